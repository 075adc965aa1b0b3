"""Which logits processors the nodes of a tree can be judged by, and how each of them is asked.

A processor that looks at the prefix alone gives each node the scores that its own path asks for, in trees and in
batches. One that keeps state from call to call means nothing at nodes that may be dropped again: the state of a known
kind is moved back and forth with the path, others are refused or stop the drafting.
Shapes: R batch rows, T ids of a row, V vocabulary.
"""

from __future__ import annotations

import pickle
import types
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.generation import logits_process as hf
from transformers.utils import logging as hf_logging

logger = hf_logging.get_logger(__name__)

# What these compute from the scores does not depend on the prefix; any other processor, a subclass of these included,
# is given each node's own.
PREFIX_FREE = (
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.TopHLogitsWarper,
    hf.SuppressTokensLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization,
)  # fmt: skip
# These run the model or keep state from call to call.
REFUSED = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.SynthIDTextWatermarkLogitsProcessor)
# An attribute by which a processor says that its result depends on the ids and scores of the call alone.
PREFIX_ONLY = "depends_on_prefix_only"
# An attribute by which a processor says that it reads the scores and never the ids; it may keep state all the same.
IGNORES_IDS = "ignores_ids"


class RowProcessor(ABC):
    """A processor that is asked for one row of the batch at a time."""

    @abstractmethod
    def row(self, index: int, ids: list[int], scores: Tensor) -> Tensor:
        """Scores (V,) of row `index` of the batch after ids, as Hugging Face has them → processed scores (V,)."""


def adapted(processors: Iterable[Any]) -> list[Any]:
    """The processors, with those that can be asked row by row in that form. ValueError for one that cannot judge
    drafts."""
    made: list[Any] = []
    for processor in processors:
        if isinstance(processor, REFUSED):
            raise ValueError(
                f"{type(processor).__name__} keeps state between tokens and cannot judge drafts; "
                "generate with the base model itself: model.base.generate(...)"
            )
        if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
            made.append(AllowedTokens(processor))
        elif type(processor).__module__.startswith("xgrammar."):
            made.append(Grammar(processor))
        else:
            made.append(processor)
    return made


def is_prefix_free(processor: Any) -> bool:
    """Can it be asked without the ids before a node?"""
    return type(processor) in PREFIX_FREE or bool(getattr(processor, IGNORES_IDS, False))


def unproven(processors: Iterable[Any]) -> list[Any]:
    """Those that may keep state from call to call, for all that is known of their class."""
    return [
        one
        for one in processors
        if not isinstance(one, RowProcessor | types.FunctionType)
        and not type(one).__module__.startswith("transformers.")
        and not getattr(one, PREFIX_ONLY, False)
    ]


@dataclass
class AllowedTokens(RowProcessor):
    """`prefix_allowed_tokens_fn`, which knows rows by their index: asked of a row alone, it never meets filled ids."""

    processor: hf.PrefixConstrainedLogitsProcessor

    def row(self, index: int, ids: list[int], scores: Tensor) -> Tensor:
        allowed = self.processor._prefix_allowed_tokens_fn
        alone = hf.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(index, sent), 1)
        prefix: Any = torch.tensor([ids], device=scores.device)
        return alone(prefix, scores.unsqueeze(0))[0]


@dataclass
class _Matched:
    """One row's grammar matcher, and the ids after the prompt that it has accepted."""

    matcher: Any
    start: int
    accepted: list[int] = field(default_factory=list)


@dataclass
class Grammar(RowProcessor):
    """xgrammar's processor for Hugging Face, whose matchers are rolled back to each node's own path.

    After a token that ends the grammar the last mask goes on to be used, as by xgrammar itself.
    """

    processor: Any
    rows: dict[int, _Matched] = field(default_factory=dict)

    def row(self, index: int, ids: list[int], scores: Tensor) -> Tensor:
        import xgrammar

        if index not in self.rows:  # first asked at the end of the prompt
            grammars = self.processor.compiled_grammars
            grammar = grammars[index if len(grammars) > 1 else 0]
            self.rows[index] = _Matched(xgrammar.GrammarMatcher(grammar), len(ids))
        own, matcher = self.rows[index], self.rows[index].matcher
        wanted = ids[own.start :]
        shared = common_prefix(own.accepted, wanted)
        if len(own.accepted) > shared:
            matcher.rollback(len(own.accepted) - shared)
            del own.accepted[shared:]
        for token in wanted[shared:]:
            if matcher.is_terminated():
                break
            if not matcher.accept_token(token):
                raise ValueError(f"the grammar does not allow token {token} after {wanted[: len(own.accepted)]}")
            own.accepted.append(token)
        if matcher.is_terminated():
            matcher.rollback(1)
            own.accepted.pop()
        mask = xgrammar.allocate_token_bitmask(1, self.processor.full_vocab_size)
        matcher.fill_next_token_bitmask(mask, 0)
        made = scores.to("cpu", copy=True).unsqueeze(0)
        xgrammar.apply_token_bitmask_inplace(made, mask)
        return made[0].to(scores.device)


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many ids both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class StateWatch:
    """Watches whether logits processors of unknown kinds change from call to call, before anything is drafted.

    waiting: is that not known yet? Until then no draft is made, so that each is asked once a token, as by
    `generate()`.
    """

    def __init__(self, processors: Iterable[Any]) -> None:
        """After their first call."""
        self.processors = unproven(processors)
        self.waiting = bool(self.processors)
        self.seen = state_of(self.processors) if self.waiting else None

    def may_draft(self) -> bool:
        """After a step: may drafts be made from here on? Says once, in the log, where they may not."""
        if not self.waiting:
            return True
        self.waiting = False
        if self.seen is not None and self.seen == state_of(self.processors):
            return True
        names = ", ".join(sorted({type(processor).__name__ for processor in self.processors}))
        logger.warning(
            "%s keeps state from call to call, or may, and cannot judge drafts: decoding goes on without them. If its "
            "result depends on the ids and scores of each call alone, give it an attribute %s = True", names,
            PREFIX_ONLY,
        )  # fmt: skip
        return False


def state_of(value: Any, within: frozenset[int] = frozenset()) -> Any:
    """What is to be seen of an object's state, to be compared with what is seen later; None where it hides some of it.

    Models, tokenizers, functions and classes count as constants.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return ("value", value)
    if isinstance(value, nn.Module | PreTrainedTokenizerBase | type | types.ModuleType | types.FunctionType):
        return ("constant", id(value))
    if id(value) in within:
        return ("within",)
    within |= {id(value)}
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return ("tensor", tuple(value.shape), zlib.crc32(content))
    if isinstance(value, torch.Generator):
        return state_of(value.get_state(), within)
    if isinstance(value, Mapping):
        return _all("mapping", [part for pair in value.items() for part in pair], within)
    if isinstance(value, list | tuple):
        return _all("list", list(value), within)
    if isinstance(value, set | frozenset):
        return _all("set", sorted(value, key=repr), within)
    if isinstance(value, types.MethodType):
        return state_of(value.__self__, within)
    if getattr(value, "__dict__", None) is not None:
        return _all(type(value).__name__, [part for pair in vars(value).items() for part in pair], within)
    try:
        return ("pickled", pickle.dumps(value))
    except Exception:
        return None


def _all(kind: str, parts: list[Any], within: frozenset[int]) -> Any:
    seen = [state_of(part, within) for part in parts]
    return None if any(part is None for part in seen) else (kind, *seen)
