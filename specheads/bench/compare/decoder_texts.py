"""The decoders of `specheads bench` as text: `transformers-lookup:10`, `eagle3 tree=chain:5 accept=typical compile`.

The first word is an entry of DECODERS or a drafter, as in generate. A new decoder is one class and one entry.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.bench import decoders
from specheads.bench.compare.cell import BenchSetup, Cell
from specheads.bench.compare.decoder_spec import DecoderSpec, OneRow
from specheads.bench.compare.llama import LlamaCpp, LlamaCppLookup
from specheads.bench.compare.openvino import OpenVINO, OpenVINOLookup
from specheads.bench.runner import Decoder
from specheads.decoding.acceptance import rule_named
from specheads.decoding.generation.many import why_unfilled
from specheads.decoding.planner import as_plan, tree_named
from specheads.decoding.registry import Registry
from specheads.heads import DraftHead
from specheads.models.config import SpecConfig
from specheads.models.costs import auto_drafter
from specheads.models.named import KNOWN, refuse_unknown_name
from specheads.models.spec_model import SpecModel
from specheads.options import refuse_unknown

_SWITCHES = ("compile", "auto", "refill")  # options without a value


@dataclass(frozen=True)
class Transformers(DecoderSpec):
    """transformers' generate(), eager."""

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        base = setup.models.target
        return decoders.transformers_generate(base, setup.max_new_tokens, **setup.sampling(cell))


@dataclass(frozen=True)
class TransformersStatic(DecoderSpec):
    """transformers' generate() with a static cache and torch.compile."""

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        base = setup.models.target
        return decoders.transformers_static(base, setup.max_new_tokens, setup.longest, **setup.sampling(cell))


@dataclass(frozen=True)
class TransformersLookup(OneRow):
    """transformers' generate(prompt_lookup_num_tokens=…)."""

    num_tokens: int = 10

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        given = {**setup.sampling(cell), "prompt_lookup_num_tokens": self.num_tokens}
        return decoders.transformers_generate(setup.models.target, setup.max_new_tokens, **given)


@dataclass(frozen=True)
class TransformersAssisted(OneRow):
    """transformers' generate(assistant_model=…), which by default drafts as long as the assistant is confident."""

    path: Path

    @property
    def drafters(self) -> tuple[str, ...]:
        return (f"model:{self.path}",)

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        small: Any = setup.drafter(*self.drafters)
        sampling = setup.sampling(cell)
        return decoders.transformers_assisted(setup.models.target, small.small, setup.max_new_tokens, sampling)


DECODERS: Registry[Any] = Registry(
    "decoder", "decoder",
    {
        "transformers": Transformers, "transformers-static": TransformersStatic,
        "transformers-lookup": TransformersLookup, "transformers-assisted": TransformersAssisted,
        "openvino": OpenVINO, "openvino-lookup": OpenVINOLookup,
        "llama.cpp": LlamaCpp, "llama.cpp-lookup": LlamaCppLookup,
    },
)  # fmt: skip


@dataclass(frozen=True)
class Ours(DecoderSpec):
    """specheads.generate(). drafter: None ("plain") for one token per step; tree and accept: as text, None for the
    defaults; auto: the drafter is a head, and draft="auto" picks its draft, prompt lookup or none by measured costs;
    refill: use generate_many() over a queue of prompts."""

    drafter: str | None
    tree: str | None = None
    accept: str | None = None
    compile: bool = False
    auto: bool = False
    refill: bool = False

    @property
    def drafters(self) -> tuple[str, ...]:
        return () if self.drafter is None else (self.drafter,)

    @property
    def compiles_as_needed(self) -> bool:
        return self.compile and self.auto

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        drafter = None if self.drafter is None else setup.drafter(self.drafter)
        plan = None if drafter is None or self.tree is None else as_plan(self.tree, drafter)
        rule = None if self.accept is None else rule_named(self.accept)
        options = setup.sampling(cell) | ({"compile": True} if self.compile else {})
        base, length = setup.models.target, setup.max_new_tokens
        chosen = drafter
        if self.auto:
            if not isinstance(drafter, DraftHead):
                raise ValueError(f"auto takes a head, and {self.drafter!r} is none")
            model = SpecModel(SpecConfig.of(drafter.config, str(base.name_or_path), None, {}), base, drafter).eval()
            chosen = auto_drafter(base, drafter)
        if self.refill:
            if reason := why_unfilled(base, chosen):
                raise ValueError(f"its rows cannot be refilled: {reason}")
            options["batch_size"] = cell.batch
        if self.auto:
            return decoders.specheads_generate(model, length, draft="auto", **options)
        return decoders.specheads_generate(base, length, draft=drafter or False, plan=plan, accept=rule, **options)


def parse_decoder(text: str) -> DecoderSpec:
    """The decoder that a text names. ValueError, in one line that quotes the text, if it names none."""
    try:
        first, *rest = shlex.split(text) or [""]
    except ValueError as error:
        raise ValueError(f"decoder {text!r}: {error}") from error
    if not first:
        raise ValueError(f"decoder {text!r} names nothing; give plain, what drafts, or one of {', '.join(DECODERS)}")
    name = first.partition(":")[0]
    try:
        options = [_option(word) for word in rest]
        given = dict(options)
        if len(given) < len(options):
            raise ValueError("a word is given twice; name another decoder for the other value")
        if name in DECODERS:
            refuse_unknown(given, (), f"word after {name}")
            spec: DecoderSpec = DECODERS.build(first)
            return spec
        refuse_unknown(given, ("tree", "accept", *_SWITCHES), "word")
        drafter = None if first == "plain" else first
        if drafter is None and given.keys() & {"tree", "accept", "auto"}:
            raise ValueError("plain drafts nothing, so it takes neither a tree nor a rule nor auto")
        if "auto" in given and given.keys() & {"tree", "accept"}:
            raise ValueError("auto chooses the tree under the exact rule, so it takes neither a tree nor a rule")
        if "tree" in given:
            tree_named(given["tree"])
        if "accept" in given:
            rule_named(given["accept"])
    except ValueError as error:
        raise ValueError(f"decoder {text!r}: {error}") from error
    return Ours(drafter, given.get("tree"), given.get("accept"), *(word in given for word in _SWITCHES))


def refuse_unknown_drafters(texts: Iterable[str], heads: Iterable[str]) -> None:
    """ValueError or FileNotFoundError, with the nearest or all known names, for a text whose first word is neither a
    decoder nor a drafter. heads: names of checkpoints that are known, too."""
    known = (*DECODERS, "plain", *heads, *(name for name in KNOWN if name != "cascade"))
    for text in texts:
        spec = parse_decoder(text)
        if isinstance(spec, Ours) and spec.drafter is not None:
            if spec.drafter.partition(":")[0] == "cascade":
                raise ValueError(
                    f"decoder {text!r}: a cascade needs a k-matrix; `specheads sweep --k-matrix` takes one"
                )
            refuse_unknown_name(spec.drafter, known, "decoder")


def _option(word: str) -> tuple[str, str]:
    if word in _SWITCHES:
        return word, ""
    key, equals, value = word.partition("=")
    if key in _SWITCHES:
        raise ValueError(f"{word!r}: {key} takes no value; write {key} to have it, and nothing to leave it out")
    if not equals or not value:
        raise ValueError(f"{word!r} is none of tree=…, accept=…, compile, auto and refill")
    return key, value


def expand(
    texts: Sequence[str], trees: Sequence[str] = (), rules: Sequence[str] = (), *, compile: bool = False
) -> list[str]:
    """The texts, each combined with all trees and rules unless it names its own; with `compile`, each of our decoders
    is also run compiled."""
    expanded: dict[str, None] = {}
    for text in texts:
        spec = parse_decoder(text)
        variants = [text]
        if isinstance(spec, Ours) and spec.drafter is not None and not spec.auto:
            for word, values, own in (("tree", trees, spec.tree), ("accept", rules, spec.accept)):
                if values and own is None:
                    variants = [f"{variant} {word}={value}" for variant in variants for value in values]
        expanded |= dict.fromkeys(variants)
        if compile and isinstance(spec, Ours) and not spec.compile:
            expanded |= dict.fromkeys(f"{variant} compile" for variant in variants)
    return list(expanded)
