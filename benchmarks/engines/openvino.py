"""OpenVINO GenAI for `specheads bench`: plain, with an EAGLE-3 head in published form, or with its own prompt lookup.

    specheads bench out/head --engine benchmarks/engines/openvino.py=ov/bin/python -d openvino -d openvino-lookup

`openvino:5:out/head` drafts chains of five with that head, `openvino:16:out/head:4:4` trees of 16 nodes, 4 deep.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from specheads.bench.compare.decoder_spec import BenchSetup, Cell, DecoderSpec, Engine
from specheads.bench.compare.peer import Peer, PeerError, write_once
from specheads.bench.figures.identity import weight_sums
from specheads.bench.figures.results import digest
from specheads.bench.runner import Decoder
from specheads.decoding.drafters import Drafter
from specheads.heads import DraftHead
from specheads.models.base.fingerprint import fingerprint_base
from specheads.models.config import SpecConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.export.exporting import export

NAME = "openvino"
NGRAM = 3  # longest n-gram that its prompt lookup searches for


@dataclass(frozen=True)
class OpenVINO(DecoderSpec):
    """num_tokens: drafted per step, 0 for plain decoding; head: the head that drafts them; depth and branching: of
    trees, 0 for chains."""

    peer: ClassVar[str | None] = NAME
    num_tokens: int = 0
    head: str = ""
    depth: int = 0
    branching: int = 0

    def __post_init__(self) -> None:
        if bool(self.num_tokens) != bool(self.head) or bool(self.depth) != bool(self.branching):
            raise ValueError("expected openvino, openvino:NUM_TOKENS:HEAD or openvino:NUM_TOKENS:HEAD:DEPTH:BRANCHING")

    @property
    def drafters(self) -> tuple[str, ...]:
        return (self.head,) if self.head else ()

    def refusal(self, cell: Cell) -> str | None:
        return "its trees do not sample" if self.depth and cell.temperature else None

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        options = {"num_assistant_tokens": self.num_tokens} if self.num_tokens else {}
        if self.depth:
            options |= {"tree_depth": self.depth, "branching_factor": self.branching}
        return _decoder(setup, cell, options, head=self.head)


@dataclass(frozen=True)
class OpenVINOLookup(DecoderSpec):
    """OpenVINO GenAI's own prompt lookup."""

    peer: ClassVar[str | None] = NAME
    num_tokens: int = 10

    def refusal(self, cell: Cell) -> str | None:
        return "its prompt lookup does not sample" if cell.temperature else None

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        options = {"num_assistant_tokens": self.num_tokens, "max_ngram_size": NGRAM}
        return _decoder(setup, cell, options, lookup=True)


def _decoder(
    setup: BenchSetup, cell: Cell, options: dict[str, int], *, head: str = "", lookup: bool = False
) -> Decoder:
    peer, base = setup.peers[NAME], setup.models.target
    folder = peer.folder / f"base-{digest(fingerprint_base(base))}"
    write_once(folder, lambda out: peer.ask("convert", model=str(base.name_or_path), out=str(out)))
    precision = "bf16" if base.dtype == torch.bfloat16 else "f32"
    loaded: dict[str, Any] = {
        "base": str(folder), "lookup": lookup, "num_threads": torch.get_num_threads(), "precision": precision
    }  # fmt: skip
    if head:
        loaded["head"] = str(_converted_head(peer, setup, setup.drafter(head), head))
    key = f"{head or 'plain'}{' lookup' if lookup else ''}"
    return peer.decoder(
        key, loaded, max_new_tokens=setup.max_new_tokens, temperature=cell.temperature, options=options,
        ends=setup.ends,
    )  # fmt: skip


def _converted_head(peer: Peer, setup: BenchSetup, drafter: Drafter, name: str) -> Path:
    """The folder with the head in OpenVINO's format, made by our own export and the peer's conversion."""
    if not isinstance(drafter, DraftHead) or drafter.config.kind != "eagle3":
        raise PeerError(f"openvino drafts with an EAGLE-3 head, and {name!r} is none")
    base = setup.models.target
    folder = peer.folder / f"head-{digest(weight_sums(drafter))}"
    config = SpecConfig.of(drafter.config, str(base.name_or_path), None, {})

    def make(out: Path) -> None:
        published = out.with_name(out.name + "-published")
        shutil.rmtree(published, ignore_errors=True)
        try:
            export(config, base, drafter, published, "eagle", dtype="float32", embeddings=True)
        except CheckpointError as error:
            raise PeerError(f"openvino: {error}") from error
        # OpenVINO numbers layers by their outputs, one less than the index of the hidden state.
        peer.ask("convert", model=str(published), out=str(out), layers=[layer - 1 for layer in drafter.layers])
        shutil.rmtree(published)

    write_once(folder, make)
    return folder


ENGINE = Engine(
    NAME, Path(__file__).with_name("openvino_worker.py"), {"openvino": OpenVINO, "openvino-lookup": OpenVINOLookup}
)
