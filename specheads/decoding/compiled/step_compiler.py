"""Chooses which part of a decode() step is compiled: all of it, what follows the draft, or the base's pass alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.generation import logits_process as hf

from specheads.decoding.acceptance import Acceptance, Exact
from specheads.decoding.compiled.graphs import DEFAULT_BACKEND, CompiledSteps
from specheads.decoding.compiled.keys import (
    code_of,
    constants_of,
    draft_shapes,
    module_state,
    options_as_tensors,
    torch_settings,
)
from specheads.decoding.drafters.base import Advance, Context, DeviceDraft, Drafter
from specheads.decoding.planner import BestFirstTree, DynamicTree, NoDraft, Plan, SampledTree, StaticTree
from specheads.decoding.planner.plan import unwrapped_plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.refill import split_prompt
from specheads.decoding.step import Rows, step_after_draft, verify, whole_step
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.grouped_attention import grouped_heads
from specheads.decoding.verify.verifier import TargetOutput

T = TypeVar("T")

# Logits processors that torch can trace, and those of their options whose values a graph reads at each call.
TRACED = (
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper, hf.SuppressTokensLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization,
)  # fmt: skip
OPTIONS = ("temperature", "top_p", "min_p")


class StepCompiler:
    """Runs the steps of one call of decode() compiled: whole if the host takes no part, else as far as possible.

    whole: drafting and judging both run in the graph (the prompt is read before the first step). judges: judging a tree
    of point masses, or a chain, does. by_target: drafts affect only how fast the text comes, not which text.
    """

    def __init__(
        self, steps: CompiledSteps, target: Target, drafter: Drafter | None, plan: Plan | None, accept: Acceptance,
        sampler: Sampler, num_top: int, *, details: bool,
    ) -> None:  # fmt: skip
        """details: the caller wants scores or divergences, which a compiled step does not return."""
        self.steps, self.target, self.drafter, self.plan = steps, target, drafter, plan
        self.sampler, self.num_top, device = sampler, num_top, target.cache.lengths.device
        exact = drafter is None or accept.is_exact(sampler)
        self.accept: Acceptance = Exact() if exact else options_as_tensors(accept, device, accept.tensor_options)
        self.by_target = exact and not isinstance(unwrapped_plan(plan), SampledTree)
        traced = all(type(processor) in TRACED for processor in sampler.processors)
        # inductor's CPU code for `probs.randomness` corrupted memory (torch 2.13).
        self.hashes = steps.backend != DEFAULT_BACKEND or not sampler.do_sample or device.type != "cpu"
        self.judges = traced and self.accept.on_device and not details and (self.by_target or self.hashes)
        if self.judges:
            sampler.processors = [options_as_tensors(one, device, OPTIONS) for one in sampler.processors]
        self.whole = self.judges and (drafter is None or (drafter.on_device and self.grows(plan)))
        self.judges &= self.whole or not branches_at_random(plan)
        self._state: Hashable = None
        self._drafters: dict[int, tuple[Any, Hashable]] = {}  # by id, with the drafter that has it
        self._code = code_of(self.accept, *sampler.processors)

    @property
    def state(self) -> Hashable:
        """What graphs depend on in the target, read once until the next `renew`."""
        if self._state is None:
            offset, kind = self.target.offset, self.target.device.type
            autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
            with self.target.lock():  # another thread's pass replaces how modules run
                base = module_state(self.target.base)
            self._state = (
                base,
                self.target.layers,
                None if offset is None else offset.shape,
                torch_settings(),
                autocast,
            )
        return self._state

    def state_of(self, drafter: Any) -> Hashable:
        """What a graph with this drafter, or the module that it runs, depends on; read once until the next `renew`."""
        if id(drafter) not in self._drafters:
            self._drafters[id(drafter)] = drafter, module_state(drafter)
        return self._drafters[id(drafter)][1]

    def renew(self) -> None:
        """Read the state again, after new prompts have come into the batch."""
        self._state = None
        self._drafters.clear()

    def key(self, *others: Any) -> Hashable:
        """The key of a graph that depends on the target and on `others`."""
        cache = self.target.cache
        return self.state, len(cache.lengths), cache.scratch, cache.end, cache.size, *others

    @property
    def judging(self) -> Hashable:
        """What judging depends on besides the tree."""
        processors = tuple(map(constants_of, self.sampler.processors))
        return self.num_top, self.sampler.do_sample, constants_of(self.accept), processors, self._code

    def whole_step(
        self, context: Context, rows: Callable[[int], Rows], limits: Tensor, shortened: bool
    ) -> Advance | None:
        """The step in one graph; None if it has to begin on the host.

        rows: of a step whose tree has this depth. limits (B,): the most new tokens. shortened: the text ends within a
        draft.
        """
        if not self.judges:
            return None
        draft, prompt = None, None
        if self.drafter is not None and self.plan is not None:
            if self.whole and not context.ranks:  # the first step: the prompt is read before it
                prompt, context = split_prompt(context, self.plan.depth + 1)
            draft = self.drafter.device_draft(context, self.plan)
            if draft is None or not (draft.drafter is None or self.grows(draft.plan)):
                return None
        context, drafter, plan, module, depth = draft or DeviceDraft(context)
        key = self.key(self.judging)
        if drafter is not None and plan is not None:
            grown = unwrapped_plan(plan)
            if isinstance(grown, StaticTree | SampledTree):
                grown.topology(len(context.root), context.root.device).complete()
            elif shortened and not self.by_target:
                return None  # the best tree of fewer levels is another tree
            if prompt is not None:
                drafter.propose(prompt, Sampler(), NoDraft(plan))
            caches = tuple((cache.end, cache.size) for cache in context.caches)
            state = self.state_of(drafter if module is None else module)
            key = self.key(self.judging, type(drafter), state, plan, context.features.shape[1], caches)
        inputs = rows(depth)._replace(root=context.root, limits=limits)
        return self._run(
            whole_step, key, self.target, self.accept, self.sampler, drafter, plan, context,
            inputs._replace(counts=None, limits=None) if self.by_target else inputs, self.num_top, module=module,
        )  # fmt: skip

    def step_after_draft(self, tree: DraftTree, rows: Callable[[int], Rows]) -> Advance | None:
        """What follows a draft, in one graph; None if judging needs the host, or if no other step would use such a
        graph."""
        if self.whole or not self.judges or tree.siblings_drawn:
            return None
        if tree.num_nodes == 1 and self.accept.uses_draft_probs:
            return None  # such a tree has none, and the graph reads them
        by_target = tree.probs is None and isinstance(self.accept, Exact)
        if not by_target and not self.hashes:
            return None
        tree = self.pad(tree)
        if self.by_paths(tree):
            return None
        # Else values cached in the topology by other steps would become inputs of the graph.
        tree = replace(tree, topology=tree.topology.bare(tree.is_chain))
        key = self.key(self.judging, draft_shapes(tree), tree.num_nodes, tree.max_depth, tree.is_chain)
        inputs = rows(tree.max_depth)
        return self._run(
            step_after_draft, key, self.target, self.accept, self.sampler, tree,
            inputs._replace(counts=None) if by_target else inputs, self.num_top,
        )  # fmt: skip

    def grows(self, plan: Plan | None) -> bool:
        """Do the plan's trees grow in the graph? Not if they choose their nodes and the target takes trees as paths."""
        chooses = isinstance(unwrapped_plan(plan), BestFirstTree | DynamicTree)
        return grows_on_device(plan) and not (chooses and self.target.has_state)

    def by_paths(self, tree: DraftTree) -> bool:
        """Does the target's pass take the tree as paths, whose number the host must know?"""
        return self.target.has_state and not tree.is_chain

    def verify(self, tree: DraftTree) -> TargetOutput:
        """The target's pass over the tree, in a graph if other steps need one for trees of this size."""
        num, padded = tree.num_nodes, self.pad(replace(tree, probs=None, logits=None))
        if self.whole or (self.judges and num == 1) or self.by_paths(padded):
            return self.target.verify(tree)
        out = self._run(verify, self.key(padded.num_nodes), self.target, padded)
        return TargetOutput(out.logits[:, :num], out.features[:, :num])

    def _run(self, function: Callable[..., T], key: Hashable, *inputs: Any, module: nn.Module | None = None) -> T:
        with grouped_heads(self.target.base), self.target.patched_forward():
            return self.steps.run(function, key, *inputs, module=module)

    def pad(self, tree: DraftTree) -> DraftTree:
        """The tree padded to the next of the drafter's sizes."""
        nodes, depth = self.target.scratch, self.depth
        sizes = () if self.drafter is None else self.drafter.tree_sizes
        if smaller := [size for size in sizes if tree.num_nodes <= size < nodes]:
            nodes, depth = smaller[0], min(depth, max(tree.max_depth, smaller[0] - 1))
        return tree.padded(nodes, depth, 0 if self.plan is None else self.plan.drafting_slots + 1)

    @property
    def depth(self) -> int:
        """The deepest drafted node's depth."""
        return 0 if self.plan is None or self.drafter is None else self.plan.depth


def grows_on_device(plan: Plan | None) -> bool:
    """Are its trees of one size, grown on the device?

    A tree with more nodes than a chain of its depth must branch; for any other the host would have to check.
    """
    if type(plan).__hash__ is None:  # it cannot be part of a key
        return False
    plan = unwrapped_plan(plan)
    if isinstance(plan, StaticTree | SampledTree):
        return True
    return isinstance(plan, BestFirstTree | DynamicTree) and plan.num_nodes > plan.depth + 1


def branches_at_random(plan: Plan | None) -> bool:
    """May the number of a node's drawn children differ from tree to tree?"""
    plan = unwrapped_plan(plan)
    return isinstance(plan, SampledTree) and plan.num_nodes > plan.depth + 1
