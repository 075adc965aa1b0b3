"""The options of a command that choose the drafter."""

from __future__ import annotations

import json
from dataclasses import dataclass

from specheads.decoding.drafters import Drafter
from specheads.models.named import Models, describe_drafter


@dataclass(frozen=True)
class DraftOptions:
    """The options of a command that choose the drafter. name "none": nothing drafts, and no other option may be given.

    ValueError, in one line, for options that contradict each other."""

    assistant: str | None = None
    name: str | None = None
    k_matrix: str | None = None
    leniency: float = 1.0

    def __post_init__(self) -> None:
        if self.assistant and self.name not in (None, "model"):
            raise ValueError(f"--assistant and --draft {self.name} both say what drafts; give one of them")
        cascade = (self.name or "").startswith("cascade:")
        if cascade and self.k_matrix is None:
            raise ValueError(f"--draft {self.name} takes --k-matrix, [[5,8],[0,8]] say: a row for each reviewer")
        if not cascade and (self.k_matrix is not None or self.leniency != 1):
            raise ValueError(
                "--k-matrix and --leniency are options of a cascade; give --draft cascade:DRAFTER+DRAFTER…"
            )

    def drafter(self, models: Models, *, auto: bool = False) -> tuple[str | None, Drafter | None]:
        """The drafter's name in a table, and the drafter; both None if nothing drafts. auto: unless an option asks for
        the head, use whichever draft is fastest."""
        if self.name == "none":
            return None, None
        name = self.name or ("auto" if auto and models.best == "head" else models.best)
        if not name.startswith("cascade:"):
            return describe_drafter(name, models.drafter(name)), models.drafter(name)
        try:
            rows = json.loads(self.k_matrix or "")
        except json.JSONDecodeError as error:
            raise ValueError(f"--k-matrix {self.k_matrix!r} is no JSON such as [[5,8],[0,8]]: {error}") from error
        return name, models.cascade(name, rows, self.leniency)
