"""Shell completion of arguments and options, without torch. Paths are left to the shell, which completes a file
wherever nothing here begins with what was typed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from specheads.cli.shipped import Kind, recipe_names, summary

# The registries import torch, so their usages are repeated here, in their order; a test compares them.
LOSSLESS = ("exact", "block", "traversal")
LOSSY = (
    "no_residual", "fuzzy:DIVERGENCE:THRESHOLD[:MODE]", "typical[:EPSILON[:DELTA]]", "lenient:LENIENCY",
    "cs_leniency:LENIENCY", "topn[:N[:MARGIN]]", "margin:RATIO", "ensemble:WEIGHT",
)  # fmt: skip
RULES = (*LOSSLESS, *LOSSY)
TREES = (
    "chain:DEPTH", "adaptive[:MAX_DEPTH[,CONFIDENCE[,SAMPLED]]]", "comb:DEPTH[,WIDTH]",
    "dynamic[:BUDGET[,DEPTH[,TOP_K]]]", "best[:BUDGET[,DEPTH[,WIDTH[,BEAMS]]]]", "static[:NODES]",
    "sampled[:BRANCHES,…]",
)  # fmt: skip
DRAFTERS = ("lookup[:NUM_TOKENS]", "ngram[:N]", "maxgram[:BIGRAMS]")
ENGINES = (
    "deepspec", "dflash", "eagle", "hydra", "jetspec", "llamacpp", "medusa", "modelopt", "mtp", "openvino", "sglang",
    "speculators", "trtllm", "vllm",
)  # fmt: skip
DTYPES = ("auto", "float32", "bfloat16", "float16")

Complete = Callable[[str], list[tuple[str, str]]]


def complete_usages(*usages: str) -> Complete:
    """The names that these usages begin with."""
    return complete_words(*(re.split(r"[:\[]", usage)[0] for usage in usages))


def complete_words(*words: str) -> Complete:
    def complete(incomplete: str) -> list[tuple[str, str]]:
        return [(word, "") for word in words if word.startswith(incomplete)]

    return complete


def complete_recipe(kind: Kind | None) -> Complete:
    """The names of shipped recipes of this kind, and YAML files here."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        names = [(name, summary(name)) for name in recipe_names(kind) if name.startswith(incomplete)]
        folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
        files = (path.as_posix() for end in ("yaml", "yml") for path in sorted(folder.glob(f"*.{end}")))
        return names + [(path, "") for path in files if path.startswith(incomplete)]

    return complete
