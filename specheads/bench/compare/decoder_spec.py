"""The interface of a decoder of `specheads bench`: what it drafts with, where it cannot run, how it is built, and from
what: one cell of the table, and the models and engines of the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from specheads.bench.compare.peer import Peer
from specheads.bench.runner import Decoder
from specheads.bench.shipped import names_in
from specheads.decoding.drafters import Drafter
from specheads.decoding.generation.hf_options import NEUTRAL
from specheads.models.named import Models


@dataclass(frozen=True)
class Cell:
    """One prompt set at one batch size, temperature (0: greedy) and top-k (0: all tokens)."""

    prompts: str
    batch: int
    temperature: float
    top_k: int = 0

    def __str__(self) -> str:
        top_k = f", k = {self.top_k}" if self.top_k else ""
        return f"{self.prompts}, batch {self.batch}, T = {self.temperature:g}{top_k}"


def by_cell(rows: Iterable[dict[str, Any]]) -> dict[Cell, list[dict[str, Any]]]:
    """Rounds, or rows of a record, by the cell in which they were measured."""
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for row in rows:
        cell = Cell(row["prompts"], row["batch"], row["temperature"], row.get("top_k", 0))
        cells.setdefault(cell, []).append(row)
    return cells


@dataclass
class BenchSetup:
    """models: the base, its tokenizer and its drafters; checkpoints: a folder of heads, which are named by their
    folders there; longest: tokens in the longest prompt; peers: engines of other programs, by name; neutral: text is
    judged, so it comes from the base's logits alone, whatever its generation config says."""

    models: Models
    checkpoints: Path | None
    max_new_tokens: int
    longest: int
    peers: dict[str, Peer] = field(default_factory=dict)
    neutral: bool = False

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
        neutral = NEUTRAL if self.neutral else {}
        if not cell.temperature:
            return {**neutral, "do_sample": False, "num_beams": 1}
        chosen = {"do_sample": True, "num_beams": 1, "temperature": cell.temperature, "top_k": cell.top_k, "top_p": 1.0}
        return {**neutral, **chosen}


class DecoderSpec(ABC):
    """The decoder that a text names. drafters: the names of its drafters, if any. refill: it takes all prompts of a
    round at once, and a finished text's row goes to the next prompt. compiles_as_needed: other texts may need other
    graphs. lossy: it may write other text than the base. peer: the engine in whose environment it runs, if any; engine:
    the program that runs it, if that is none."""

    peer: ClassVar[str | None] = None
    engine: ClassVar[str] = "transformers"

    @property
    def drafters(self) -> tuple[str, ...]:
        return ()

    @property
    def refill(self) -> bool:
        return False

    @property
    def compiles(self) -> bool:
        return False

    @property
    def compiles_as_needed(self) -> bool:
        return False

    @property
    def lossy(self) -> bool:
        return False

    def refusal(self, cell: Cell) -> str | None:
        """Why the decoder cannot run in this cell; None if it can."""
        return None

    @abstractmethod
    def build(self, setup: BenchSetup, cell: Cell) -> Decoder: ...


class OneRow(DecoderSpec):
    """A decoder that cannot decode batches."""

    reason: ClassVar[str] = "takes one row at a time"

    def refusal(self, cell: Cell) -> str | None:
        return None if cell.batch == 1 else self.reason


@dataclass(frozen=True)
class Engine:
    """Another program: a file outside this package has one as ENGINE, and `--engine FILE=PYTHON` registers it.

    worker: the script that PYTHON runs and that answers the requests of `Peer`; decoders: the words that name its
    decoders, whose specs build them with `setup.peers[name].decoder`."""

    name: str
    worker: Path
    decoders: Mapping[str, type[DecoderSpec]]
