"""walk() through a verified tree, and the rules that say which drafted tokens stand.

Lossless: Exact, Block, Traversal. Not lossless: Lenient, Typical, TopN, Margin, CSLeniency, Fuzzy, Ensemble,
Unadjusted.
"""

from specheads.accept.block import Block
from specheads.accept.ensemble import Ensemble
from specheads.accept.exact import Exact, normalised, residual
from specheads.accept.fsd import fuzzy_from
from specheads.accept.fuzzy import Fuzzy
from specheads.accept.lenient import Lenient
from specheads.accept.paths import walk
from specheads.accept.rule import Acceptance, Laws, LevelRule, Verdict
from specheads.accept.tokens import CSLeniency, Margin, TokenRule, TopN, Typical
from specheads.accept.traversal import Traversal
from specheads.accept.unadjusted import Unadjusted

__all__ = [
    "Acceptance", "Block", "CSLeniency", "Ensemble", "Exact", "Fuzzy", "Laws", "Lenient", "LevelRule", "Margin",
    "TokenRule", "TopN", "Traversal", "Typical", "Unadjusted", "Verdict", "fuzzy_from", "normalised", "residual",
    "walk",
]  # fmt: skip
