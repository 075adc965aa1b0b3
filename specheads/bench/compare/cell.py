"""What a decoder of `specheads bench` is given: one cell of the table, and the models and peers of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.bench.compare.peer import Peer
from specheads.decoding.drafters import Drafter
from specheads.models.named import Models


@dataclass(frozen=True)
class Cell:
    """One prompt set at one batch size and temperature; 0 is greedy."""

    prompts: str
    batch: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.prompts}, batch {self.batch}, T = {self.temperature:g}"


@dataclass
class BenchSetup:
    """models: the base, its tokenizer and its drafters; checkpoints: a folder whose heads go by their names there;
    longest: most tokens of a prompt; peers: programs in environments of their own, by name."""

    models: Models
    checkpoints: Path | None
    max_new_tokens: int
    longest: int
    peers: dict[str, Peer]

    def drafter(self, name: str) -> Drafter:
        """As Models.drafter; also the name of a head in `checkpoints`."""
        return self.models.drafter(self.source(name))

    def source(self, name: str) -> str:
        """The path of the head of that name in `checkpoints`, else the name itself."""
        if self.checkpoints is not None and not Path(name).exists():
            head = self.checkpoints / name
            if "/" not in name and (head / "config.json").is_file():
                return str(head)
        return name

    @property
    def ends(self) -> list[int]:
        """The ids that end a text."""
        ends = self.models.target.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    def sampling(self, cell: Cell) -> dict[str, Any]:
        """How to sample, in generate()'s words. What is neutral overrides the base's own generation config."""
        if not cell.temperature:
            return {"do_sample": False, "num_beams": 1}
        return {"do_sample": True, "num_beams": 1, "temperature": cell.temperature, "top_k": 0, "top_p": 1.0}
