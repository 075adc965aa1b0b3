"""Which logits processors can judge the nodes of a tree, and how each is called.

A processor that depends on the prefix alone gives each node the scores of its own path, in trees and in batches. One
that keeps state from call to call cannot judge nodes that may be rejected: the state of known kinds is moved along the
path; others are refused or stop the drafting. So does one that mixes the rows of a batch.
Shapes: R batch rows, T ids of a row, V vocabulary.
"""

from __future__ import annotations

import pickle
import types
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.generation import logits_process as hf
from transformers.utils import logging as hf_logging

logger = hf_logging.get_logger(__name__)

# Their result does not depend on the prefix. Every other processor, subclasses of these included, gets each node's own
# prefix.
PREFIX_FREE = (
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.TopHLogitsWarper,
    hf.SuppressTokensLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization,
)  # fmt: skip
# These run the model or keep state from call to call.
REFUSED = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.SynthIDTextWatermarkLogitsProcessor)
# The attribute by which a processor declares that its result depends on the ids and scores of the call alone.
PREFIX_ONLY = "depends_on_prefix_only"
# The attribute by which a processor declares that it reads the scores and never the ids. It may still keep state.
IGNORES_IDS = "ignores_ids"


class RowProcessor(ABC):
    """A processor that is called for one row of the batch at a time."""

    @abstractmethod
    def row(self, index: int, ids: list[int], scores: Tensor) -> Tensor:
        """Scores (V,) of row `index` of the batch after ids, as Hugging Face has them → processed scores (V,)."""


def adapt(processors: Iterable[Any]) -> list[Any]:
    """The processors, some kinds wrapped as a `RowProcessor`. ValueError for one that cannot judge drafts."""
    result: list[Any] = []
    for processor in processors:
        if isinstance(processor, REFUSED):
            raise ValueError(
                f"{type(processor).__name__} keeps state between tokens and cannot judge drafts; "
                "call the base model's own generate() for it"
            )
        if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
            result.append(AllowedTokens(processor))
        elif type(processor).__module__.startswith("xgrammar."):
            result.append(Grammar(processor))
        else:
            result.append(processor)
    return result


def is_prefix_free(processor: Any) -> bool:
    """Can it be called without the ids before a node?"""
    return type(processor) in PREFIX_FREE or bool(getattr(processor, IGNORES_IDS, False))


def is_foreign(processor: Any) -> bool:
    """Is it neither from transformers nor a `RowProcessor`?"""
    return not isinstance(processor, RowProcessor) and not type(processor).__module__.startswith("transformers.")


def call(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
    """processor(ids (R, T), scores (R, V)), outside inference mode for foreign ones, which may use autograd."""
    if not is_foreign(processor):
        return processor(ids, scores)
    with torch.inference_mode(False), torch.no_grad():
        return processor(ids.clone(), scores.clone()).detach()


def possibly_stateful(processors: Iterable[Any]) -> list[Any]:
    """The processors whose type does not rule out that they keep state from call to call."""

    def is_plain_function(one: Any) -> bool:
        return isinstance(one, types.FunctionType) and one.__closure__ is None

    return [
        one
        for one in processors
        if is_foreign(one) and not is_plain_function(one) and not getattr(one, PREFIX_ONLY, False)
    ]


@dataclass
class AllowedTokens(RowProcessor):
    """`prefix_allowed_tokens_fn`, which gets the row's index: called row by row, it never sees padding ids."""

    processor: hf.PrefixConstrainedLogitsProcessor

    def row(self, index: int, ids: list[int], scores: Tensor) -> Tensor:
        allowed = self.processor._prefix_allowed_tokens_fn
        alone = hf.PrefixConstrainedLogitsProcessor(lambda _, prefix: allowed(index, prefix), 1)
        prefix: Any = torch.tensor([ids], device=scores.device)
        return alone(prefix, scores.unsqueeze(0))[0]


@dataclass
class _RowMatcher:
    """One row's grammar matcher; start: the prompt's length; accepted: the ids after it that it has accepted."""

    matcher: Any
    start: int
    accepted: list[int] = field(default_factory=list)


@dataclass
class Grammar(RowProcessor):
    """xgrammar's processor for Hugging Face, whose matchers are rolled back to each node's own path.

    After a token that ends the grammar, the last mask stays in use, as in xgrammar itself.
    """

    processor: Any
    rows: dict[int, _RowMatcher] = field(default_factory=dict)

    def row(self, index: int, ids: list[int], scores: Tensor) -> Tensor:
        import xgrammar

        if index not in self.rows:  # the first call is at the end of the prompt
            grammars = self.processor.compiled_grammars
            grammar = grammars[index if len(grammars) > 1 else 0]
            self.rows[index] = _RowMatcher(xgrammar.GrammarMatcher(grammar), len(ids))
        row, matcher = self.rows[index], self.rows[index].matcher
        path = ids[row.start :]
        shared = common_prefix_length(row.accepted, path)
        if len(row.accepted) > shared:
            matcher.rollback(len(row.accepted) - shared)
            del row.accepted[shared:]
        for token in path[shared:]:
            if matcher.is_terminated():
                break
            if not matcher.accept_token(token):
                raise ValueError(f"the grammar does not allow token {token} after {path[: len(row.accepted)]}")
            row.accepted.append(token)
        if matcher.is_terminated():
            matcher.rollback(1)
            row.accepted.pop()
        mask = xgrammar.allocate_token_bitmask(1, self.processor.full_vocab_size)
        matcher.fill_next_token_bitmask(mask, 0)
        masked = scores.to("cpu", copy=True).unsqueeze(0)
        xgrammar.apply_token_bitmask_inplace(masked, mask)
        return masked[0].to(scores.device)


def common_prefix_length(one: list[int], other: list[int]) -> int:
    """The length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def mixes_rows(processor: Any, ids: Tensor, scores: Tensor, processed: Tensor, rows: Iterable[int]) -> bool:
    """Do the processed scores (R, V) of one of these rows depend on other rows?

    Each row is processed again in its place, among rows with its own ids (R, T) and with its scores (R, V) halved.
    """
    for row in rows:
        changed = (scores[row] / 2).expand_as(scores).clone()
        changed[row] = scores[row]
        again = call(processor, ids[row].expand_as(ids), changed)
        if not torch.allclose(again[row], processed[row], rtol=1e-4, atol=1e-5, equal_nan=True):
            return True
    return False


class ProcessorWatch:
    """Detects logits processors of unknown kinds that cannot judge drafts, before anything is drafted.

    These keep state from call to call, or mix the rows of a batch, which drafts let run apart.

    Until that is known nothing is drafted, so that each processor is called once a token, as in Hugging Face's
    generate().
    """

    def __init__(self, suspects: list[Any]) -> None:
        self.suspects, self.before = suspects, snapshot(suspects)

    @classmethod
    def start(cls, processors: Iterable[Any], may_mix: bool) -> ProcessorWatch | None:
        """A watch after the processors' first call; None if all can judge drafts. may_mix: do they see several rows in
        one call?"""
        processors = list(processors)
        suspects = possibly_stateful(processors)
        return cls(suspects) if suspects or (may_mix and any(map(is_foreign, processors))) else None

    def may_draft(self, mixing: Callable[[], list[Any]]) -> bool:
        """Call after a step: may tokens be drafted from now on? Logs one warning if not.

        mixing() gives the processors that mix rows; it calls them, so only those without state are asked."""
        if self.before is not None and self.before == snapshot(self.suspects):
            if mixers := mixing():
                logger.warning(
                    "%s mixes the rows of the batch, which would accept different numbers of drafts: decoding "
                    "continues without drafts", ", ".join(sorted({name_of(processor) for processor in mixers})),
                )  # fmt: skip
            return not mixers
        names = ", ".join(sorted(map(name_of, self.suspects)))
        logger.warning(
            "%s keeps state from call to call, or may, and cannot judge drafts: decoding continues without drafts. If "
            "its result depends on the ids and scores of each call alone, give it an attribute %s = True", names,
            PREFIX_ONLY,
        )  # fmt: skip
        return False


def name_of(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def snapshot(value: Any, within: frozenset[int] = frozenset()) -> Any:
    """A comparable snapshot of an object's state; None if some of it cannot be read.

    Models, tokenizers and classes count as constants, functions as the values of their closure. within: ids of the
    objects that contain this one.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return ("value", value)
    if isinstance(value, nn.Module | PreTrainedTokenizerBase | type | types.ModuleType):
        return ("constant", id(value))
    if id(value) in within:
        return ("within",)
    within |= {id(value)}
    if isinstance(value, types.FunctionType):
        return _snapshot_all("function", [cell_value(cell) for cell in value.__closure__ or ()], within)
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return ("tensor", tuple(value.shape), zlib.crc32(content))
    if isinstance(value, torch.Generator):
        return snapshot(value.get_state(), within)
    if isinstance(value, Mapping):
        return _snapshot_all("mapping", [part for pair in value.items() for part in pair], within)
    if isinstance(value, list | tuple):
        return _snapshot_all("list", list(value), within)
    if isinstance(value, set | frozenset):
        return _snapshot_all("set", sorted(value, key=repr), within)
    if isinstance(value, types.MethodType):
        return snapshot(value.__self__, within)
    if getattr(value, "__dict__", None) is not None:
        return _snapshot_all(type(value).__name__, [part for pair in vars(value).items() for part in pair], within)
    try:
        return ("pickled", pickle.dumps(value))
    except Exception:
        return None


def cell_value(cell: types.CellType) -> Any:
    """The value of a closure cell; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _snapshot_all(kind: str, parts: list[Any], within: frozenset[int]) -> Any:
    seen = [snapshot(part, within) for part in parts]
    return None if any(part is None for part in seen) else (kind, *seen)
