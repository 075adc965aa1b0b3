"""What a decoder of `specheads bench` is built from: one cell of the table, and the models and peers of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.bench.compare.peer import Peer
from specheads.bench.shipped import names_in
from specheads.decoding.drafters import Drafter
from specheads.models.named import Models


@dataclass(frozen=True)
class Cell:
    """One prompt set at one batch size and temperature (0: greedy)."""

    prompts: str
    batch: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.prompts}, batch {self.batch}, T = {self.temperature:g}"


@dataclass
class BenchSetup:
    """models: the base, its tokenizer and its drafters; checkpoints: a folder of heads, which are named by their
    folders there; longest: tokens in the longest prompt; peers: other engines in their own environments, by name."""

    models: Models
    checkpoints: Path | None
    max_new_tokens: int
    longest: int
    peers: dict[str, Peer]

    def drafter(self, name: str) -> Drafter:
        """As Models.drafter; name may also be that of a head in `checkpoints`."""
        return self.models.drafter(self.source(name))

    def source(self, name: str) -> str:
        """The path of the head with this name in `checkpoints`, or the name itself if there is none."""
        if self.checkpoints is not None and not Path(name).exists() and name in names_in(self.checkpoints):
            return str(self.checkpoints / name)
        return name

    @property
    def ends(self) -> list[int]:
        """The end-of-sequence ids."""
        ends = self.models.target.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    def sampling(self, cell: Cell) -> dict[str, Any]:
        """The sampling options as generate()'s arguments. Neutral values override the base's generation config."""
        if not cell.temperature:
            return {"do_sample": False, "num_beams": 1}
        return {"do_sample": True, "num_beams": 1, "temperature": cell.temperature, "top_k": 0, "top_p": 1.0}
