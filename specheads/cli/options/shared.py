"""Options that several commands share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specheads.cli.complete import DRAFTERS, DTYPES, LOSSLESS, LOSSY, RULES, TREES, complete_usages, complete_words
from specheads.options import option

MODEL = "Head checkpoint or plain Hugging Face model: a directory or hub id."
HEAD = "Head checkpoint: a directory or a hub id."
RECIPE = "YAML file, or the name of a shipped recipe (`specheads recipes` lists them)."
OVERRIDES = "Values that replace the recipe's."


@dataclass(frozen=True, kw_only=True)
class Output:
    as_json: bool = option(False, "Print one JSON object and nothing else on stdout.", flags=("--json",))

    def record(self) -> dict[str, Any]:
        """The options as a record on disk has them."""
        values = {name: value for name, value in asdict(self).items() if name != "as_json"}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which base, and how and where it is loaded."""

    dtype: str = option(
        "auto",
        "float32, bfloat16 or float16; auto: the checkpoint's, on a slow CPU or for a small base float32.",
        autocompletion=complete_words(*DTYPES),
    )
    device: str = option("auto", "cpu, cuda, cuda:1 …; auto: the GPU if there is one.")
    base: str | None = option(None, "Base model to use instead of the one the checkpoint names.")
    quantize: str | None = option(
        None, "Load target and draft models in 4 or 8 bits with bitsandbytes, or with int8 weights on a CPU.",
        metavar="4bit|8bit|int8",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What drafts, in which trees, and which drafts are accepted: generate()'s draft=, tree= and accept=."""

    draft: str = option(
        "auto",
        f"What drafts: auto[:FILE], head, {', '.join(DRAFTERS)}, model:PATH (a smaller model), a head's folder, "
        "cascade:DRAFTER+DRAFTER… or none. auto picks what pays at each step, by the costs of `specheads tune`; with "
        "--tree or --accept it is the head, or else lookup.",
        metavar="NAME",
    )
    tree: str | None = option(
        None, f"Draft tree: {', '.join(TREES)} (default: the drafter's).", autocompletion=complete_usages(*TREES)
    )
    accept: str | None = option(
        None,
        f"Which drafts are accepted: {', '.join(LOSSLESS)} (lossless); {', '.join(LOSSY)} (default: exact).",
        autocompletion=complete_usages(*RULES),
    )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How long a text is, and how its tokens are drawn: generate()'s arguments of the same names."""

    max_new_tokens: int = option(128, "Maximum tokens to generate.", min=1)
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", min=0.0)
    top_p: float | None = option(None, "Nucleus sampling.", min=0.0, max=1.0)
    top_k: int | None = option(None, "Sample from this many of the most likely tokens.", min=1)
    seed: int | None = option(None, "Sampling seed (default: a new one each time).", min=0)

    def sampling(self) -> dict[str, Any]:
        """The arguments of generate(); they override the base's own generation config."""
        chosen: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            top_p = 1.0 if self.top_p is None else self.top_p
            chosen |= {"temperature": self.temperature, "top_p": top_p, "top_k": self.top_k or 0}
        return chosen
