"""Assistant: a draft model that drafts as much as transformers' assisted generation would.

Shapes: B batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.model import DraftModel
from specheads.decoding.planner import AdaptiveChain, Expand, Plan, SampledTree, chain
from specheads.decoding.planner.plan import positive
from specheads.decoding.planner.record import RecordDraftLogits
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree

SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclass(frozen=True)
class AssistantOptions:
    """What transformers' generation config says of an assistant, under its names and with its defaults.

    num_assistant_tokens: drafted a step; fewer where one of a probability below assistant_confidence_threshold ends
    the draft (0: none does). num_assistant_tokens_schedule: "constant", or either "heuristic": two tokens more behind a
    draft that was accepted whole, one fewer behind any other, up to 20 or num_assistant_tokens if that is more. Both
    heuristics begin anew with each call: transformers' writes its number into the assistant's own configuration, and
    moves the threshold as it goes, which is not done here.
    """

    num_assistant_tokens: int = 20
    assistant_confidence_threshold: float = 0.4
    num_assistant_tokens_schedule: str = "constant"

    def __post_init__(self) -> None:
        positive("num_assistant_tokens", self.num_assistant_tokens)
        if not 0 <= self.assistant_confidence_threshold <= 1:
            raise ValueError(
                f"assistant_confidence_threshold={self.assistant_confidence_threshold} must be a probability, 0 (never "
                "stop early) to 1"
            )
        if self.num_assistant_tokens_schedule not in SCHEDULES:
            raise ValueError(
                f"num_assistant_tokens_schedule={self.num_assistant_tokens_schedule!r} must be one of "
                f"{', '.join(SCHEDULES)}"
            )

    @classmethod
    def of(cls, assistant: Any, given: dict[str, Any]) -> AssistantOptions:
        """Those given by name, not None; for the others what the assistant's own generation config says."""
        own = {f.name: getattr(assistant.generation_config, f.name, None) for f in fields(cls)}
        return cls(**{name: value for name, value in {**own, **given}.items() if value is not None})

    def plan(self, sampled: bool) -> Plan:
        """The chain they ask for, of tokens sampled from the draft's law or of its likeliest."""
        count, sure = self.num_assistant_tokens, self.assistant_confidence_threshold
        if self.num_assistant_tokens_schedule != "constant":
            return ScheduledChain(max(AssistantOptions.num_assistant_tokens, count), sure, sampled, now=count)
        if sure:
            return AdaptiveChain(count, sure, sampled)
        return SampledTree((1,) * count) if sampled else chain(count)


@dataclass(frozen=True)
class ScheduledChain(AdaptiveChain):
    """An adaptive chain that ends at depth `now`, and has room for max_depth."""

    now: int = 1

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        return AdaptiveChain(self.now, self.confidence, self.sampled).grow(root, expand, sampler, vocab_size)

    def limited(self, depth: int) -> ScheduledChain:
        return replace(self, max_depth=depth, now=min(self.now, depth))

    def after(self, whole: bool) -> ScheduledChain:
        """The chain behind a draft that was accepted whole, or was not."""
        return replace(self, now=min(self.now + 2, self.max_depth) if whole else max(1, self.now - 1))


class Assistant(DraftModel):
    """`DraftModel(small)` whose default plan is that of `options`, sampled where the text is."""

    def __init__(
        self, small: PreTrainedModel, options: AssistantOptions, *, tokenizer: Any = None, target_tokenizer: Any = None
    ) -> None:
        super().__init__(small, tokenizer=tokenizer, target_tokenizer=target_tokenizer)
        self.options = options

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return self.options.plan(do_sample and not self.through_text)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        inner = plan.plan if isinstance(plan, RecordDraftLogits) else plan
        if not isinstance(inner, ScheduledChain):
            return super().propose(context, sampler, plan)
        memory = context.memory
        own = inner
        if "scheduled" in memory:
            own = memory["scheduled"].after(accepted_whole(context.new, memory["drafted"]))
        memory["scheduled"] = own
        inner = own.limited(min(own.depth, inner.depth))
        tree = super().propose(
            context, sampler, replace(plan, plan=inner) if isinstance(plan, RecordDraftLogits) else inner
        )
        memory["drafted"] = tree.topology.drafted.sum(1)
        return tree


def accepted_whole(new: Tensor, drafted: Tensor) -> bool:
    """Did every row that goes on keep all of its draft? new (B,): committed in the last step, the root included."""
    return bool(((new - 1 == drafted) | (new == 0)).all())
