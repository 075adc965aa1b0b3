"""What the words of a sweep stand for: the target, its tokenizer, and each drafter, loaded when first asked for."""

from __future__ import annotations

import json
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.bench import cost
from specheads.bigram import load_bigrams
from specheads.commands import arguments
from specheads.convert import load_head
from specheads.drafters import Cascade, Drafter, DraftModel, MaxGram, NGram, NGramStorage, PromptLookup
from specheads.fingerprint import fingerprint
from specheads.sweep.grid import PLAIN, Sweep
from specheads.target import text_config

KINDS = ("model", "lookup", "ngram", "maxgram", "cascade")


class Bench:
    """The models of one sweep on one device."""

    def __init__(self, sweep: Sweep, dtype: str = "auto", device: str = "auto") -> None:
        """ValueError or OSError, with the reason, for a target or a head that does not load."""
        self._made: dict[str, Drafter | None] = {PLAIN: None}
        self._costs: dict[tuple[int, ...], list[float]] = {}
        self.sweep = sweep
        named = [part for name in sweep.drafters for part in name.removeprefix("cascade:").split("+")]
        heads = [name for name in named if name != PLAIN and name.partition(":")[0] not in KINDS]
        if heads:
            model, self.tokenizer = arguments.load(heads[0], sweep.base, dtype, device)
            self.base: PreTrainedModel = model.base
            self._made[heads[0]] = model.head
        elif sweep.base:
            self.base, self.tokenizer = arguments.load_base(sweep.base, dtype, device)
        else:
            raise ValueError("no head among the drafters names the target; say which it is by base (--base)")
        for setting in sweep.settings():  # so that a name that stands for nothing ends a sweep before it begins
            self.drafter(setting.drafter, setting.k_matrix)

    def drafter(self, name: str, k_matrix: str = "") -> Drafter | None:
        """What the name stands for, made once; k_matrix: of a cascade."""
        key = f"{name} {k_matrix}".strip()
        if key not in self._made:
            self._made[key] = self._cascade(name, k_matrix) if name.startswith("cascade:") else self._drafter(name)
        return self._made[key]

    def _cascade(self, name: str, k_matrix: str) -> Cascade:
        drafts = [self.drafter(part) for part in name.removeprefix("cascade:").split("+")]
        rows, asked = json.loads(k_matrix), self.sweep
        return Cascade([d for d in drafts if d is not None], rows, asked.leniency, asked.notation)

    def costs(self, cascade: Cascade) -> list[float] | None:
        """Of a pass of the target and of each draft, by the sweep's cost model; None where a head is among them, for
        which none is known."""
        if cascade.has_head:
            return None
        models = [self.base, *(getattr(draft, "small", None) for draft in cascade.drafts)]
        if self.sweep.cost != "measured":
            return cost.published(self.sweep.cost, [getattr(model, "name_or_path", None) for model in models])
        key = tuple(id(model) for model in models)
        if key not in self._costs:
            self._costs[key] = cost.measured(models)
        return self._costs[key]

    def _drafter(self, name: str) -> Drafter:
        kind, _, rest = name.partition(":")
        if kind not in KINDS:
            return load_head(self.base, name, dtype=self.base.dtype).head
        vocab_size = text_config(self.base).vocab_size
        if kind == "model":
            small: Any = AutoModelForCausalLM.from_pretrained(rest, dtype=self.base.dtype)
            return DraftModel(small.to(self.base.device))
        if kind == "maxgram":
            return MaxGram(bigrams=load_bigrams(rest, vocab_size) if rest else None)
        try:
            number = int(rest) if rest else None
        except ValueError as error:
            raise ValueError(f"drafter {name!r}: {rest!r} is not a whole number") from error
        if kind == "lookup":
            return PromptLookup() if number is None else PromptLookup(num_tokens=number)
        return NGram(storage=NGramStorage(3 if number is None else number, vocab_size))

    def identity(self) -> list[Any]:
        """What tells these models from others of the same names: digests of their weights."""
        modules = [(name, getattr(drafter, "small", drafter)) for name, drafter in self._made.items()]
        return [fingerprint(self.base), *([name, digest(module)] for name, module in sorted(modules))]


def digest(module: Any) -> list[float]:
    """Sums over each weight of a module, in float64; of what has no weights, nothing."""
    if not isinstance(module, nn.Module):
        return []
    return [float(weight.detach().double().sum()) for weight in module.parameters()]
