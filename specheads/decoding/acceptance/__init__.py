"""walk(), which judges a verified tree, and the rules that decide which drafted tokens are accepted.

Lossless: Exact, Block, Traversal. Not lossless: Lenient, Typical, TopN, Margin, CSLeniency, Fuzzy, Ensemble,
NoResidual.
"""

from specheads.decoding.acceptance.block import Block
from specheads.decoding.acceptance.ensemble import Ensemble
from specheads.decoding.acceptance.exact import Exact, normalised, residual
from specheads.decoding.acceptance.fsd import fuzzy_from
from specheads.decoding.acceptance.fuzzy import Fuzzy
from specheads.decoding.acceptance.lenient import Lenient
from specheads.decoding.acceptance.named import RULES
from specheads.decoding.acceptance.no_residual import NoResidual
from specheads.decoding.acceptance.rule import Acceptance, LevelRule, TargetProbs, Verdict
from specheads.decoding.acceptance.tokens import CSLeniency, Margin, TokenRule, TopN, Typical
from specheads.decoding.acceptance.traversal import Traversal
from specheads.decoding.acceptance.walking import walk

Unadjusted = NoResidual  # an older name

__all__ = [
    "RULES",
    "Acceptance",
    "Block",
    "CSLeniency",
    "Ensemble",
    "Exact",
    "Fuzzy",
    "Lenient",
    "LevelRule",
    "Margin",
    "NoResidual",
    "TargetProbs",
    "TokenRule",
    "TopN",
    "Traversal",
    "Typical",
    "Unadjusted",
    "Verdict",
    "fuzzy_from",
    "normalised",
    "residual",
    "walk",
]  # fmt: skip
