"""What the words of a sweep stand for: the target, its tokenizer, and each drafter, loaded when first asked for."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.bigram import load_bigrams
from specheads.commands import arguments
from specheads.convert import load_head
from specheads.drafters import Drafter, DraftModel, MaxGram, NGram, NGramStorage, PromptLookup
from specheads.fingerprint import fingerprint
from specheads.sweep.grid import PLAIN, Sweep
from specheads.target import text_config

KINDS = ("model", "lookup", "ngram", "maxgram")


class Bench:
    """The models of one sweep on one device."""

    def __init__(self, sweep: Sweep, dtype: str = "auto", device: str = "auto") -> None:
        """ValueError or OSError, with the reason, for a target or a head that does not load."""
        self._made: dict[str, Drafter | None] = {PLAIN: None}
        heads = [name for name in sweep.drafters if name != PLAIN and name.partition(":")[0] not in KINDS]
        if heads:
            model, self.tokenizer = arguments.load(heads[0], sweep.base, dtype, device)
            self.base: PreTrainedModel = model.base
            self._made[heads[0]] = model.head
        elif sweep.base:
            self.base, self.tokenizer = arguments.load_base(sweep.base, dtype, device)
        else:
            raise ValueError("no head among the drafters names the target; say which it is by base (--base)")
        for name in sweep.drafters:  # so that a name that stands for nothing ends a sweep before it begins
            self.drafter(name)

    def drafter(self, name: str) -> Drafter | None:
        if name not in self._made:
            self._made[name] = self._drafter(name)
        return self._made[name]

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
