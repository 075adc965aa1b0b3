"""llama.cpp as a decoder, through llama-cpp-python: plain, or with llama-cpp-python's prompt lookup."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from specheads.bench.compare.cell import BenchSetup, Cell
from specheads.bench.compare.decoder_spec import OneRow
from specheads.bench.compare.llama_source import write_source
from specheads.bench.compare.peer import PeerError, write_once
from specheads.bench.figures.results import digest
from specheads.bench.runner import Decoder
from specheads.models.base.fingerprint import fingerprint_base

NAME = "llama.cpp"
WORKER = Path(__file__).with_name("llama_worker.py")
NGRAM = 3  # longest n-gram that its prompt lookup searches for


@dataclass(frozen=True)
class LlamaCpp(OneRow):
    """Plain decoding: one token per step."""

    peer: ClassVar[str | None] = NAME
    reason: ClassVar[str] = "llama-cpp-python generates one row at a time"

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        return _decoder(setup, cell)


@dataclass(frozen=True)
class LlamaCppLookup(LlamaCpp):
    """llama-cpp-python's prompt lookup, of at most num_tokens per step."""

    num_tokens: int = 10

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"llama.cpp-lookup:{self.num_tokens} drafts nothing; give at least 1 token")

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        return _decoder(setup, cell, lookup=self.num_tokens, ngram=NGRAM)


def _decoder(setup: BenchSetup, cell: Cell, *, lookup: int = 0, ngram: int = 0) -> Decoder:
    if NAME not in setup.peers:
        raise PeerError(f"{NAME} decodes in an environment of its own: give --peer {NAME}=PYTHON")
    peer, base = setup.peers[NAME], setup.models.target
    path = peer.folder / f"base-{digest(fingerprint_base(base), str(base.dtype))}.gguf"

    def convert(out: Path) -> None:
        source = out.with_name(out.name + "-source")
        shutil.rmtree(source, ignore_errors=True)
        write_source(base, setup.models.tokenizer, source)
        peer.ask("convert", model=str(source), out=str(out))
        shutil.rmtree(source)

    write_once(path, convert)
    loaded: dict[str, Any] = {
        "base": str(path), "num_threads": torch.get_num_threads(), "exact_cache": base.dtype == torch.float32,
        # Room for the longest text and a draft, plus one.
        "num_positions": setup.longest + setup.max_new_tokens + lookup + 1, "lookup": lookup, "ngram": ngram,
    }  # fmt: skip
    return peer.decoder(
        f"lookup {lookup}" if lookup else "plain", loaded, max_new_tokens=setup.max_new_tokens,
        temperature=cell.temperature, ends=setup.ends,
    )  # fmt: skip
