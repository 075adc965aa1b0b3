"""Decoding: how generate() and generate_many() decode, read once from their arguments.

Shapes: B batch rows, T prompt columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.decoding.acceptance import Acceptance, Fuzzy, as_rule
from specheads.decoding.acceptance.rule import missing_draft_probs
from specheads.decoding.compiled import CompiledSteps, compiled_steps
from specheads.decoding.drafters import as_drafter
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.generation.warnings import (
    scaled_by_pass,
    warn_of_scales,
    warn_of_slow_bfloat16,
    warn_past_limits,
)
from specheads.decoding.loop import Stop, decode
from specheads.decoding.planner import Plan, as_plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.refill import Refill
from specheads.decoding.results import Step
from specheads.decoding.verify.model_inputs import ModelInputs
from specheads.decoding.verify.seq2seq import Source, make_target, refuse_branching
from specheads.decoding.verify.verifier import Verifier

logger = hf_logging.get_logger(__name__)


@dataclass(frozen=True)
class Decoding:
    """A base model, what drafts for it, and how drafts are accepted.

    drafter: None for plain decoding. plan: None for the drafter's own. keep_divergences: as in decode().
    compiled: what compiles the steps, None if nothing does. kernels: as in generate(). scaled_by_pass: what of the base
    makes logits depend on the width of a pass, None if nothing is known to.
    """

    base: PreTrainedModel
    drafter: Drafter | None
    plan: Plan | None
    accept: Acceptance
    keep_divergences: bool = False
    compiled: CompiledSteps | None = None
    kernels: bool = True
    scaled_by_pass: str | None = None

    @classmethod
    def parse(
        cls, base: PreTrainedModel, *, draft: Any, tree: Any, accept: Any, output_divergences: bool,
        compile: bool | str, kernels: bool,
    ) -> Decoding:  # fmt: skip
        """From generate()'s arguments of the same names. ValueError or TypeError for those that cannot be combined."""
        found = as_drafter(draft, base=base)
        plan, rule = as_plan(tree, found), as_rule(accept)
        if found is None and plan is not None:
            raise ValueError("tree= says what to draft, but nothing drafts (no draft=); give one of the two")
        if rule.requires_draft_probs and found is not None and not found.gives_draft_probs:
            raise missing_draft_probs(rule, found)
        if output_divergences and not isinstance(rule, Fuzzy):
            raise ValueError(f"output_divergences=True is for accept=Fuzzy(...), which measures one, not for {rule!r}")
        scaled = scaled_by_pass(base)
        if found is not None:
            warn_of_slow_bfloat16(base)
            warn_of_scales(base, scaled)
        compiled = compiled_steps(base, compile) if compile else None
        return cls(base, found, plan, rule, output_divergences, compiled, kernels, scaled)

    def prepare(
        self, device: torch.device, do_sample: bool, *, source: Source | None = None, decoder_mask: Tensor | None = None
    ) -> tuple[Verifier, Plan | None]:
        """The target, and the plan of what is drafted for it. source, decoder_mask: for an encoder-decoder. ValueError
        if the base cannot serve the plan."""
        plan = self._plan_for(device, do_sample)
        target = make_target(
            self.base, self.drafter.layers if self.drafter else (), scratch=plan.num_nodes if plan else 1,
            source=source, decoder_mask=decoder_mask, static=self.compiled is not None,
        )  # fmt: skip
        return target, plan

    def steps(
        self,
        target: Verifier,
        plan: Plan | None,
        ids: Tensor,
        lengths: Tensor,
        *,
        sampler: Sampler,
        stop: Stop,
        max_new_tokens: int | Sequence[int],
        eos: Collection[int],
        inputs: ModelInputs | None = None,
        keep_scores: bool = False,
        refill: Refill | None = None,
    ) -> Iterator[Step]:
        """decode() of prompts ids (B, T), packed left, of lengths (B,), with what `prepare` returned."""
        return decode(
            target, self.drafter, ids, lengths, plan=plan, sampler=sampler, accept=self.accept, stop=stop,
            max_new_tokens=max_new_tokens, inputs=inputs, eos=eos, keep_scores=keep_scores,
            keep_divergences=self.keep_divergences, refill=refill, compiled=self.compiled,
            kernels=self.kernels,
        )  # fmt: skip

    def is_lossless(self, rows: int) -> bool:
        """Is the text of a batch of so many rows distributed as the base's own, token by token and row by row?"""
        return self.accept.lossless and (self.scaled_by_pass is None or (self.drafter is None and rows == 1))

    def _plan_for(self, device: torch.device, do_sample: bool) -> Plan | None:
        if self.drafter is None:
            return None
        plan = self.drafter.default_plan(device, do_sample) if self.plan is None else self.plan
        if self.base.config.is_encoder_decoder:
            refuse_branching(self.base, plan)
        return plan

    def warn_past_limits(self, length: int) -> None:
        """Log a warning if a text of `length` tokens is longer than the base or the drafter was made for."""
        warn_past_limits(self.base, None if self.drafter is None else self.drafter.trained_length, length)
