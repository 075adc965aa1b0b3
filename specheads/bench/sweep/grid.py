"""The options of a sweep, in YAML or on the command line, and the settings they expand to."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.decoding.acceptance import RULES, rule_named, threshold_field, with_threshold
from specheads.decoding.drafters import gives_draft_probs
from specheads.decoding.planner import tree_named
from specheads.options import OptionError, refuse_unknown
from specheads.training.recipe.recipe import RecipeError, parse_file

PLAIN = "none"  # drafts nothing
TASKS = ("signatures", "syntax", "mmlu", "sampled_mmlu", "gsm8k", "csqa", "humaneval", "prompts")
COSTS = ("measured", "model_parameters", "previous_work")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Setting:
    """One way to decode. drafter, accept, tree: as text, as on the command line (tree None: the drafter's default).
    temperature 0 is greedy. top_k: sample among this many tokens; 0: among all. k_matrix: of a cascade, as JSON."""

    drafter: str
    accept: str = "exact"
    tree: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    k_matrix: str = ""

    @property
    def lossless(self) -> bool:
        return rule_named(self.accept).lossless

    @property
    def reference(self) -> Setting:
        """The setting to compare speed with: the same drafts under the exact rule; for a lossless rule, no drafts."""
        if self.drafter != PLAIN and not self.lossless:
            return dataclasses.replace(self, accept="exact")
        return dataclasses.replace(self, drafter=PLAIN, accept="exact", tree=None, k_matrix="")

    def __str__(self) -> str:
        parts = [self.drafter, self.k_matrix, self.tree or "", "" if self.drafter == PLAIN else self.accept]
        if self.temperature:
            parts.append(f"T={self.temperature:g}" + (f" k={self.top_k}" if self.top_k else ""))
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Sweep:
    """All drafters × rules × trees × temperatures × top-k on one task. A single value may stand for a list of one.

    drafters: head checkpoints, `model:PATH`, `cascade:DRAFTER+DRAFTER…`, `auto` (with the first head), `none`, or names
    in DRAFTERS. The target is `base`, else the base that a head names. accept: names of rules; commas give several, as
    in `fuzzy:js,tv:0.1,0.2`. thresholds: replace the threshold of each lossy rule in accept. k_matrices: of cascades,
    as lists of rows. leniency, notation: of `Cascade`. cost: of a pass, measured here, or model_parameters or
    previous_work. trees: names of plans. gamma: lengths of chains. top_k: sample among this many tokens; 1 is greedy,
    as is temperature 0. task: signatures, syntax, mmlu, sampled_mmlu, gsm8k, csqa, humaneval, or prompts (without
    answers). data: files with the task's rows (default: the hub's or the shipped ones). batch_size: prompts decoded
    together to judge their text. speed_prompts: this many prompts, evenly spaced, are also timed one by one, `repeats`
    times. clock: `wall`, or `cpu`, this process's CPU time, for a shared CPU. max_new_tokens: None for the task's own.
    run_code: let HumanEval run code that the model wrote.
    """

    drafters: tuple[str, ...]
    base: str | None = None
    accept: tuple[str, ...] = ("exact",)
    thresholds: tuple[float, ...] = ()
    k_matrices: tuple[str, ...] = ()
    leniency: float = 1.0
    notation: str = "incremental"
    cost: str = "measured"
    trees: tuple[str, ...] = ()
    gamma: tuple[int, ...] = ()
    temperature: tuple[float, ...] = ()
    top_k: tuple[int, ...] = ()
    task: str = "signatures"
    data: tuple[str, ...] = ()
    num_prompts: int | None = None
    max_new_tokens: int | None = None
    batch_size: int = 8
    speed_prompts: int = 16
    repeats: int = 1
    clock: str = "wall"
    seed: int = 0
    chat: bool = False
    run_code: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "tuple" in str(field.type):
                value = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
                if field.name == "k_matrices":
                    value = _parse_matrices(value)
                kind = {"float": float, "int": int}.get(str(field.type).removeprefix("tuple[").split(",")[0], str)
                object.__setattr__(self, field.name, tuple(_parse_value(field.name, entry, kind) for entry in value))
        if not self.drafters:
            raise OptionError(
                "{drafters} is empty: give a head checkpoint, model:PATH, lookup, ngram, maxgram or cascade:…",
                drafters=...,
            )
        for name, least in (("gamma", 1), ("top_k", 0), ("temperature", 0)):
            for entry in getattr(self, name):
                if not entry >= least:
                    raise OptionError(f"{{{name}}} must be at least {least}", **{name: entry})
        for name in ("repeats", "batch_size", "speed_prompts", "num_prompts", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise OptionError(f"{{{name}}} must be a whole number of at least 1", **{name: value})
        refuse_unknown([self.task], TASKS, "task")
        refuse_unknown([self.cost], COSTS, "cost")
        cascades = [name for name in self.drafters if name.startswith("cascade:")]
        if bool(cascades) != bool(self.k_matrices):
            have = f"{cascades[0]!r} takes k_matrices" if cascades else "k_matrices are for drafters cascade:…"
            raise ValueError(f"{have}, for instance [[5, 8], [0, 8]]: a row for each reviewer, a column for each draft")
        self._refuse_unused(bool(cascades))
        refuse_unknown([self.clock], CLOCKS, "clock")
        if self.trees and self.gamma:
            raise OptionError(
                "{trees} and {gamma} both say what to draft; a gamma of 5 is the tree chain:5", trees=..., gamma=...
            )
        for tree in self.trees:
            tree_named(tree)
        for drafter in self.drafters:
            if not gives_draft_probs(drafter):
                for rule in self.rules():
                    if rule_named(rule).requires_draft_probs:
                        raise ValueError(
                            f"accept {rule!r} compares the draft's probabilities with the target's, and {drafter!r} "
                            "gives none; sweep it with a head or a draft model"
                        )
        self.settings()

    def _refuse_unused(self, has_cascade: bool) -> None:
        """OptionError for an option that differs from its default but would have no effect."""
        rules = itertools.chain.from_iterable(map(expand_rules, self.accept))
        default = {field.name: field.default for field in dataclasses.fields(self)}
        for name, used, other in (
            ("thresholds", any(map(threshold_field, rules)), "a rule that has a threshold, such as fuzzy:js"),
            ("chat", self.task != "signatures", "a task whose prompts are text, and those of signatures are ids"),
            ("run_code", self.task == "humaneval", "the task humaneval"),
            *((name, has_cascade, "a drafter cascade:…") for name in ("leniency", "notation", "cost")),
        ):
            value = getattr(self, name)
            if not used and value != default[name]:
                given = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise OptionError(f"{{{name}}} goes with {other}; give one, or leave it out", **{name: given})

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Sweep:
        """ValueError for an unknown, missing or malformed option."""
        if not isinstance(options, Mapping):
            raise ValueError(f"a sweep is a mapping with drafters, accept and so on, not {options!r:.60}")
        refuse_unknown(options, [f.name for f in dataclasses.fields(cls)], "option of a sweep")
        if options.get("drafters") is None:
            raise OptionError(
                "{drafters} is missing: give a head checkpoint, model:PATH, lookup, ngram or maxgram", drafters=...
            )
        return cls(**options)

    def rules(self) -> list[str]:
        """The rules as `RULES.write` writes them, without duplicates."""
        rules: dict[str, None] = {}
        for text in itertools.chain.from_iterable(map(expand_rules, self.accept)):
            if self.thresholds and threshold_field(text):
                rules |= dict.fromkeys(with_threshold(text, value) for value in self.thresholds)
            else:
                rules[RULES.write(rule_named(text))] = None
        return list(rules)

    def samplings(self) -> list[tuple[float, int]]:
        """The (temperature, top-k) pairs, without duplicates. Greedy is (0, 0), whichever of the two asks for it."""
        top_k = self.top_k or (0,)
        temperatures = self.temperature or ((1.0,) if any(k > 1 for k in top_k) else (0.0,))
        pairs = [(t, k) if t and k != 1 else (0.0, 0) for t in temperatures for k in top_k]
        return list(dict.fromkeys(pairs))

    def settings(self) -> list[Setting]:
        """Every setting once: no drafts first, and for each drafter the exact rule before the others."""
        trees: tuple[str | None, ...] = self.trees or tuple(f"chain:{n}" for n in self.gamma) or (None,)
        settings: dict[Setting, None] = {}
        for temperature, top_k in self.samplings():
            settings[Setting(PLAIN, temperature=temperature, top_k=top_k)] = None
            for drafter, tree in itertools.product(self.drafters, trees):
                if drafter == PLAIN:
                    continue
                matrices = self.k_matrices if drafter.startswith("cascade:") else ("",)
                for matrix, rule in itertools.product(matrices, ["exact", *self.rules()]):
                    settings[Setting(drafter, rule, tree, temperature, top_k, matrix)] = None
        return list(settings)


def expand_rules(text: str) -> Iterator[str]:
    """Expand a text with commas into rules: `fuzzy:js,tv:0.1` → `fuzzy:js:0.1`, `fuzzy:tv:0.1`."""
    parts = []
    for part in text.split(":"):
        key, equals, values = part.rpartition("=")
        parts.append([f"{key}{equals}{value.strip()}" for value in values.split(",")])
    return map(":".join, itertools.product(*parts))


def read_sweep(path: Path | None, overrides: Mapping[str, Any]) -> Sweep:
    """The sweep in a YAML file, if any, with these options overriding it. ValueError if it cannot be run, OSError if
    the file cannot be read."""
    options: Any = {}
    if path is not None:
        options = parse_file(path)
        if not isinstance(options, dict):
            raise RecipeError(f"{path} holds {options!r:.60}: expected a mapping with drafters, accept and so on")
    return Sweep.from_dict({**options, **{key: value for key, value in overrides.items() if value not in (None, [])}})


def parse_numbers(text: str | None, name: str, kind: type) -> list[Any] | None:
    """`0.02,0.05` → [0.02, 0.05]. ValueError, with the option's name, if a number cannot be parsed."""
    return None if text is None else [_parse_value(name, part.strip(), kind) for part in text.split(",")]


def parse_range(text: str, name: str) -> tuple[int | None, int]:
    """`32-256` → (32, 256), `96` → (None, 96). ValueError, with the option's name, if it cannot be parsed."""
    low, dash, high = text.partition("-")
    if not dash:
        low, high = "", low
    least, most = (_parse_value(name, part.strip(), int) if part else None for part in (low, high))
    if most is None or most < 1 or (dash and (least is None or not 1 <= least <= most)):
        raise OptionError(f"{{{name}}}: expected a number of at least 1, or two, the smaller first", **{name: text})
    return least, most


def _parse_matrices(given: tuple[Any, ...]) -> tuple[str, ...]:
    """Each matrix as JSON. given: matrices as lists or JSON, or the rows of a single matrix."""
    try:
        read = [json.loads(matrix) if isinstance(matrix, str) else matrix for matrix in given]
    except json.JSONDecodeError as error:
        raise OptionError(
            f"{{k_matrices}} is no JSON such as [[5, 8], [0, 8]]: {error}", k_matrices=", ".join(map(str, given))
        ) from error
    if read and all(isinstance(row, list) and row and not isinstance(row[0], list) for row in read):
        read = [read]
    return tuple(json.dumps(matrix) for matrix in read)


def _parse_value(name: str, value: Any, kind: type) -> Any:
    if kind is str:
        return str(value)
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or (kind is int and isinstance(value, float) and number != value):
        raise OptionError(f"{{{name}}} is not {'a whole number' if kind is int else 'a number'}", **{name: value})
    return number
