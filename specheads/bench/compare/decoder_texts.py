"""The decoders of `specheads bench` as text: `transformers-lookup:10`, `eagle3 tree=chain:5 accept=typical compile`.

The first word is an entry of DECODERS or a drafter, as in generate. A new decoder is one class and one entry; one of
another program comes from a file of its own (see `Engine`).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from specheads.bench import decoders
from specheads.bench.compare.decoder_spec import BenchSetup, Cell, DecoderSpec, Engine, OneRow
from specheads.bench.runner import Decoder
from specheads.decoding.acceptance import rule_named
from specheads.decoding.drafters import Drafter, gives_draft_probs
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
_CASCADE = ("k", "leniency", "notation")  # options of a cascade


@dataclass(frozen=True)
class Transformers(DecoderSpec):
    """transformers' generate(), eager."""

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        base = setup.models.target
        return decoders.transformers_generate(base, setup.max_new_tokens, **setup.sampling(cell))


@dataclass(frozen=True)
class TransformersStatic(DecoderSpec):
    """transformers' generate() with a static cache and torch.compile."""

    @property
    def compiles(self) -> bool:
        return True

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        base = setup.models.target
        return decoders.transformers_static(base, setup.max_new_tokens, setup.longest, **setup.sampling(cell))


@dataclass(frozen=True)
class TransformersLookup(OneRow):
    """transformers' generate(prompt_lookup_num_tokens=…)."""

    num_tokens: int = 10

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        options = {**setup.sampling(cell), "prompt_lookup_num_tokens": self.num_tokens}
        return decoders.transformers_generate(setup.models.target, setup.max_new_tokens, **options)


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
    },
)  # fmt: skip


def load_engine(file: Path) -> Engine:
    """Register the decoders of the engine in a Python file, which is run. ValueError if it has none."""
    spec = importlib.util.spec_from_file_location(f"specheads_engine_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(
            f"{file} is not a Python file; expected one with an ENGINE, such as benchmarks/engines/llama.py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    engine = getattr(module, "ENGINE", None)
    if not isinstance(engine, Engine):
        raise ValueError(f"{file} has no ENGINE = Engine(name, worker, decoders) (docs/bench.md)")
    DECODERS.update(engine.decoders)
    return engine


@dataclass(frozen=True)
class Ours(DecoderSpec):
    """specheads.generate(). drafter: None ("plain") for one token per step; tree and accept: as text, None for the
    defaults; auto: the drafter is a head, and draft="auto" picks its draft, prompt lookup or none by measured costs;
    refill: use generate_many() over a queue of prompts; k_matrix (as JSON), leniency, notation: of a cascade."""

    engine: ClassVar[str] = "specheads"
    drafter: str | None
    tree: str | None = None
    accept: str | None = None
    compile: bool = False
    auto: bool = False
    refill: bool = False
    k_matrix: str = ""
    leniency: float = 1.0
    notation: str = "incremental"

    @property
    def drafters(self) -> tuple[str, ...]:
        return () if self.drafter is None or self.k_matrix else (self.drafter,)

    @property
    def compiles(self) -> bool:
        return self.compile

    @property
    def compiles_as_needed(self) -> bool:
        return self.compile and self.auto

    @property
    def lossy(self) -> bool:
        return self.accept is not None and not rule_named(self.accept).lossless

    @property
    def exact(self) -> Ours:
        """The same drafts under the exact rule."""
        return replace(self, accept=None)

    def load(self, setup: BenchSetup) -> Drafter | None:
        """The drafter, loaded once."""
        if self.drafter is None or not self.drafter.startswith("cascade:"):
            return None if self.drafter is None else setup.drafter(self.drafter)
        parts = self.drafter.removeprefix("cascade:").split("+")
        source = f"cascade:{'+'.join(map(setup.source, parts))}"
        if not self.k_matrix:
            return setup.models.drafter(source)
        name = f"{self.drafter} {self.k_matrix} {self.leniency:g} {self.notation}"
        if name not in setup.models.drafters:
            rows = json.loads(self.k_matrix)
            setup.models.drafters[name] = setup.models.cascade(source, rows, self.leniency, self.notation)
        return setup.models.drafters[name]

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        drafter = self.load(setup)
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
        words = dict(options)
        if len(words) < len(options):
            raise ValueError("a word is given twice; name another decoder for the other value")
        if name in DECODERS:
            refuse_unknown(words, (), f"word after {name}")
            spec: DecoderSpec = DECODERS.build(first)
            return spec
        return _ours(first, words)
    except ValueError as error:
        raise ValueError(f"decoder {text!r}: {error}") from error


def exact_twin(name: str) -> str:
    """The text of the decoder with the same drafts under the exact rule."""
    return " ".join(word for word in name.split(" ") if not word.startswith("accept="))


def _ours(first: str, words: dict[str, str]) -> Ours:
    cascade = _CASCADE if first.startswith("cascade:") else ()
    refuse_unknown(words, ("tree", "accept", *_SWITCHES, *cascade), "word")
    drafter = None if first == "plain" else first
    if drafter is None and words.keys() & {"tree", "accept", "auto"}:
        raise ValueError("plain drafts nothing, so it takes neither a tree nor a rule nor auto")
    if "auto" in words and words.keys() & {"tree", "accept"}:
        raise ValueError("auto chooses the tree under the exact rule, so it takes neither a tree nor a rule")
    if "tree" in words:
        tree_named(words["tree"])
    if "accept" in words and rule_named(words["accept"]).requires_draft_probs and not gives_draft_probs(first):
        raise ValueError(
            f"the rule {words['accept']} compares the draft's probabilities with the target's, and {first} gives none"
        )
    if "k" not in words and (without := words.keys() & {"leniency", "notation"}):
        raise ValueError(f"{min(without)} goes with k=…, such as k=[[5,8],[0,8]]: a row a reviewer, a column a draft")
    try:
        matrix = json.dumps(json.loads(words["k"])) if "k" in words else ""
        leniency = float(words.get("leniency", 1.0))
    except ValueError as error:
        raise ValueError(f"k is not a matrix such as [[5,8],[0,8]], or leniency not a number: {error}") from error
    switches = {word: word in words for word in _SWITCHES}
    of_cascade = {"leniency": leniency, "notation": words.get("notation", "incremental")} if cascade else {}
    return Ours(drafter, words.get("tree"), words.get("accept"), k_matrix=matrix, **switches, **of_cascade)  # type: ignore[arg-type]


def refuse_unknown_drafters(texts: Iterable[str], heads: Iterable[str]) -> None:
    """ValueError or FileNotFoundError, with the nearest or all known names, for a text whose first word is neither a
    decoder nor a drafter. heads: names of checkpoints that are known, too."""
    known = (*DECODERS, "plain", *heads, *KNOWN)
    for text in texts:
        spec = parse_decoder(text)
        if isinstance(spec, Ours) and spec.drafter is not None:
            for name in spec.drafter.removeprefix("cascade:").split("+"):
                refuse_unknown_name(name, known, "decoder")


def _option(word: str) -> tuple[str, str]:
    if word in _SWITCHES:
        return word, ""
    key, equals, value = word.partition("=")
    if key in _SWITCHES:
        raise ValueError(f"{word!r}: {key} takes no value; write {key} to have it, and nothing to leave it out")
    if not equals or not value:
        raise ValueError(f"{word!r} is none of tree=…, accept=…, compile, auto and refill")
    return key, value


def expand(texts: Sequence[str], trees: Sequence[str] = (), rules: Sequence[str] = ()) -> list[str]:
    """The texts, each combined with all trees and rules unless it names its own. With rules, the exact one is first."""
    rules = list(itertools.chain.from_iterable(map(expand_rules, rules)))
    expanded: dict[str, None] = {}
    for text in texts:
        spec = parse_decoder(text)
        variants = [text]
        if isinstance(spec, Ours) and spec.drafter is not None and not spec.auto:
            if trees and spec.tree is None:
                variants = [f"{variant} tree={tree}" for variant in variants for tree in trees]
            if rules and spec.accept is None:
                words = ["", *(f" accept={rule}" for rule in rules if rule != "exact")]
                variants = [variant + word for variant in variants for word in words]
        expanded |= dict.fromkeys(variants)
    return list(expanded)


def expand_rules(text: str) -> Iterator[str]:
    """A text with commas as several rules: `fuzzy:js,tv:0.1` → `fuzzy:js:0.1`, `fuzzy:tv:0.1`."""
    parts = []
    for part in text.split(":"):
        key, equals, values = part.rpartition("=")
        parts.append([f"{key}{equals}{value.strip()}" for value in values.split(",")])
    return map(":".join, itertools.product(*parts))
