"""The options of `specheads adapt`, declared once for Python, the record and the command line.

Nothing here imports torch, so that --help does not wait for it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specheads.options import OptionError, argument, option

# What may change between a stopped run and the one that resumes it.
_FREE = ("output", "minutes", "tokens", "dry_run")


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """Fit a trained head to your own sessions.

    The head is measured on sessions that are held out, in real greedy decoding; it is trained on the others until a
    budget is spent, and measured again on the same texts. Rows are as for training: messages, prompt, text or
    input_ids. Where a row has no answer the base writes it. Rows with a `domain` are measured by domain, and --old
    shows what the head forgot of other text.

    HEAD may be one of ours, MTP modules, or a head in another program's format, which is then also written back into
    OUTPUT/served. A stopped run resumes with the same command. The exit status is 3 if the head became worse.

    \b
    Examples:
      specheads adapt out/head --data sessions.jsonl --output out/mine
      specheads adapt org/eagle3-head --base my/model --data sessions.jsonl \\
        --old general.jsonl --minutes 60
      specheads adapt out/head --data sessions.jsonl --rank 16 --tokens 500000
      specheads adapt out/head --data sessions.jsonl --dry-run
    """

    head: str = argument("HEAD", "Head checkpoint, of any format: a directory or a hub id.", named=True)
    base: str | None = option(None, "Base model to use instead of the one the checkpoint names.")
    data: list[str] = option(help="Your sessions: files, globs or a hub id; repeatable.")
    old: list[str] | None = option(None, "Rows of other text, on which the head is measured too; repeatable.")
    output: Path = option(Path("runs/adapt"), "Folder for the head, its card and the run.")
    minutes: float = option(20.0, "Minutes of training, at most.")
    tokens: float | None = option(None, "Tokens to train on, at most (default: as the minutes allow).")
    held_out: int = option(32, "Sessions to measure on, at most a quarter of them, and as many of --old.", min=1)
    rank: int | None = option(
        None, "Train low-rank adapters of this rank, merged at the end, instead of the whole head.", min=1
    )
    learning_rate: float = option(3e-4, "Peak learning rate; it falls to a tenth over the budget.")
    max_length: int = option(1024, "Most tokens of a row.", min=16)
    max_new_tokens: int = option(128, "Most tokens of an answer of the base, and of a measured text.", min=1)
    seed: int = option(0, "For which sessions are held out, and for training.")
    dry_run: bool = option(False, "Print what would be done, and exit.")

    def __post_init__(self) -> None:
        for name in ("minutes", "tokens", "learning_rate"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise OptionError(f"{{{name}}} must be above 0", **{name: f"{value:g}"})
        if self.max_length <= self.max_new_tokens:
            raise OptionError(
                "{max_length} must be above {max_new_tokens}",
                max_length=self.max_length, max_new_tokens=self.max_new_tokens,
            )  # fmt: skip

    @property
    def deciding(self) -> dict[str, Any]:
        """The options with which a run resumes, as JSON has them; its budget may grow."""
        known = AdaptOptions.__dataclass_fields__
        return {name: value for name, value in asdict(self).items() if name in known and name not in _FREE}
