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
from specheads.decoding.planner.plan import unwrapped_plan, with_grown
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.options import require_count, require_number

SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclass(frozen=True)
class AssistantOptions:
    """The options of an assistant in transformers' generation config, with its names and defaults.

    num_assistant_tokens: the most tokens drafted per step. assistant_confidence_threshold: a token of a lower
    probability ends the draft (0: none does). num_assistant_tokens_schedule: "constant", or a "heuristic": two tokens
    more after a draft that was accepted whole, one fewer after any other, up to 20 or num_assistant_tokens if that is
    more. Both heuristics start again with each call. transformers' "heuristic" writes its number into the assistant's
    generation config, and adapts the threshold; neither is done here.
    """

    num_assistant_tokens: int = 20
    assistant_confidence_threshold: float = 0.4
    num_assistant_tokens_schedule: str = "constant"

    def __post_init__(self) -> None:
        require_count("num_assistant_tokens", self.num_assistant_tokens)  # its schedules leave floats
        if self.num_assistant_tokens < 1:
            raise ValueError(f"num_assistant_tokens={self.num_assistant_tokens} must be at least 1")
        require_number("assistant_confidence_threshold", self.assistant_confidence_threshold)
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
        """The options in `given` that are not None; the others from the assistant's generation config."""
        config = {f.name: getattr(assistant.generation_config, f.name, None) for f in fields(cls)}
        return cls(**{name: value for name, value in {**config, **given}.items() if value is not None})

    def plan(self, sampled: bool) -> Plan:
        """The chain these options describe. sampled: draw its tokens instead of taking the likeliest."""
        count, threshold = int(self.num_assistant_tokens), self.assistant_confidence_threshold
        if self.num_assistant_tokens_schedule != "constant":
            return ScheduledChain(max(AssistantOptions.num_assistant_tokens, count), threshold, sampled, length=count)
        if threshold:
            return AdaptiveChain(count, threshold, sampled)
        return SampledTree((1,) * count) if sampled else chain(count)


@dataclass(frozen=True)
class ScheduledChain(AdaptiveChain):
    """An adaptive chain of at most `length` tokens in this step, and at most max_depth in any step."""

    length: int = 1

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        return AdaptiveChain(self.length, self.confidence, self.sampled).grow(root, expand, sampler, vocab_size)

    def limited(self, depth: int) -> ScheduledChain:
        return replace(self, max_depth=depth, length=min(self.length, depth))

    def next(self, accepted_whole: bool) -> ScheduledChain:
        """The chain of the step after this one."""
        return replace(self, length=min(self.length + 2, self.max_depth) if accepted_whole else max(1, self.length - 1))


class Assistant(DraftModel):
    """`DraftModel(small)` with the default plan of `options`, sampled if the text is."""

    def __init__(
        self, small: PreTrainedModel, options: AssistantOptions, *, tokenizer: Any = None, target_tokenizer: Any = None
    ) -> None:
        super().__init__(small, tokenizer=tokenizer, target_tokenizer=target_tokenizer)
        self.options = options

    @property
    def refillable(self) -> bool:
        constant = self.options.num_assistant_tokens_schedule == "constant"  # the others look at the whole batch
        return constant and super().refillable

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return self.options.plan(do_sample and not self.through_text)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        given = unwrapped_plan(plan)
        if not isinstance(given, ScheduledChain):
            return super().propose(context, sampler, plan)
        memory = context.memory
        scheduled = given
        if "scheduled" in memory:
            scheduled = memory["scheduled"].next(accepted_whole(context.new, memory["drafted"]))
        memory["scheduled"] = scheduled
        limited = scheduled.limited(min(scheduled.depth, given.depth))
        tree = super().propose(context, sampler, with_grown(plan, limited))
        memory["drafted"] = tree.topology.drafted.sum(1)
        return tree


def accepted_whole(new: Tensor, drafted: Tensor) -> bool:
    """Was all of the draft accepted in every unfinished row? new (B,): tokens committed last step, root included."""
    return bool(((new - 1 == drafted) | (new == 0)).all())
