"""The cost of compiled steps: each of the few steps that an automatic draft chooses from is one graph, timed whole.

Shapes: B batch rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specheads.bench.tune.timing import (
    Dummy,
    TuneConfig,
    fastest_round,
    fitting_lengths,
    lookup_ms,
    random_prompts,
)
from specheads.decoding.acceptance import Exact
from specheads.decoding.compiled import compiled_steps
from specheads.decoding.compiled.graphs import reason_not_compiled
from specheads.decoding.drafters.auto import READ_WIDTHS
from specheads.decoding.drafters.base import Context, DeviceDraft, Drafter
from specheads.decoding.drafters.pending import PendingFeatures
from specheads.decoding.loop import decode
from specheads.decoding.planner import Plan, StaticTree, chain
from specheads.decoding.planner.by_cost import Curve, StepCosts
from specheads.decoding.planner.by_cost.candidates import COMPILED_CHAINS, LARGEST
from specheads.decoding.planner.plan import ReserveSlots
from specheads.decoding.planner.static import parallel_chains
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.causal import Target
from specheads.heads import DraftHead
from specheads.terminal import Report

Job = tuple[int, int, StaticTree | None, int]  # context length, nodes of a dummy, head's tree, positions it reads
UNTIMED = 3  # warm-up steps: the first reads the prompt, and the next may compile


def tune_compiled(
    base: PreTrainedModel, head: DraftHead | None, config: TuneConfig, report: Report | None
) -> StepCosts:
    """Time steps of plain decoding, of dummy drafts and of the head's drafts. Compiling them takes most of the time."""
    chains = [] if head is None else [chain(n) for n in sorted({min(n, head.max_depth) for n in COMPILED_CHAINS})]
    trees = [] if head is None or head.max_depth < 2 else [parallel_chains(4, 2)]
    lengths = fitting_lengths(base, config, [tree.num_nodes for tree in (*chains, *trees)], UNTIMED)
    jobs: list[Job] = [(length, nodes, None, 0) for length in lengths for nodes in config.nodes]
    drafted: list[Job] = [(lengths[0], 0, tree, READ_WIDTHS[0]) for tree in (*chains, *trees)]
    drafted += [(lengths[0], 0, tree, READ_WIDTHS[-1]) for tree in chains[:1]]
    times: dict[Job, list[list[float]]] = {job: [] for job in (*jobs, *drafted)}
    for number in range(config.rounds * len(times)):
        job = list(times)[number % len(times)]
        if report:
            what = f"{job[1]} nodes" if job[2] is None else f"the head's {job[2].num_nodes} nodes"
            report(number / len(times) / config.rounds, f"{what} after {job[0]} tokens")
        times[job].append(_timed(base, head, config, job))
    if report:
        report(1.0, f"{len(times)} compiled steps, each {config.rounds * config.steps} times")
    ms = {job: fastest_round(rounds) for job, rounds in times.items()}
    verify = {length: Curve.fit((job[1], ms[job]) for job in jobs if job[0] == length) for length in lengths}
    zero = Curve(tuple((nodes, 0.0) for nodes in config.nodes))
    lookup = Curve.fit((length, lookup_ms(length, config.batch)) for length in lengths)
    if not chains:
        return StepCosts(config.batch, verify, zero, lookup)

    def drafting(tree: StaticTree, width: int) -> float:
        """Milliseconds of a step with this tree, less those of verifying as many nodes."""
        return max(0.0, ms[lengths[0], 0, tree, width] - verify[lengths[0]](tree.num_nodes))

    first, *others = chains
    short = drafting(first, READ_WIDTHS[0])
    level = (drafting(others[-1], READ_WIDTHS[0]) - short) / (others[-1].depth - first.depth) if others else 0.0
    level = max(0.0, level)
    read = max(0.0, short - (first.depth - 1) * level)
    wide = max(0.0, drafting(first, READ_WIDTHS[-1]) - (first.depth - 1) * level)
    levels = [(1, level), *((4, max(0.0, drafting(tree, READ_WIDTHS[0]) - read)) for tree in trees)]
    reads = Curve.fit(((READ_WIDTHS[0], read), (READ_WIDTHS[-1], wide)))
    shapes = {tree.inner_nodes: drafting(tree, READ_WIDTHS[0]) for tree in (*chains, *trees)}
    return StepCosts(config.batch, verify, zero, lookup, reads, Curve.fit(levels), shapes)


def _timed(base: PreTrainedModel, head: DraftHead | None, config: TuneConfig, job: Job) -> list[float]:
    """Milliseconds of each step, without the dummy's drafting. ValueError if anything was not compiled."""
    length, nodes, tree, width = job
    drafter: Dummy | _Whole
    if tree is None:
        drafter, plan = Dummy(() if head is None else head.layers, nodes), chain(max(2, nodes) - 1)
    else:
        assert head is not None
        drafter, plan = _Whole(head, tree, width), tree
    target = Target(base, drafter.layers, scratch=LARGEST, static=True)
    compiled = compiled_steps(base, config.compile)
    device: Any = target.device
    ids = random_prompts(base, config.batch, length).to(device)
    steps = decode(
        target, drafter, ids, torch.full((config.batch,), length, device=device), plan=plan, sampler=Sampler(),
        accept=Exact(), stop=lambda row, text, count: -1, compiled=compiled,
        max_new_tokens=config.new_tokens(plan.num_nodes, UNTIMED),
    )  # fmt: skip
    for _ in range(UNTIMED):
        next(steps)
    times = [(next(steps).seconds - drafter.seconds) * 1e3 for _ in range(config.steps)]
    if reason := next(iter(compiled.failures.values()), reason_not_compiled(target)):
        raise ValueError(f"{type(base).__name__} decodes without compiling ({reason}); tune without --compile")
    return times


class _Whole(Drafter):
    """Drafts the head's tree as AutoDrafter does, in one graph with the rest of the step."""

    seconds = 0.0

    def __init__(self, head: DraftHead, tree: StaticTree, width: int) -> None:
        self.head, self.tree, self.width = head, tree, width
        self.unread = PendingFeatures()

    @property
    def layers(self) -> tuple[int, ...]:
        return self.head.layers

    @property
    def draft_modules(self) -> tuple[nn.Module, ...]:
        return (self.head,)

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return self.tree

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        self.unread.add(context)
        return self.unread.propose(self.head, context, sampler, ReserveSlots(plan, max(READ_WIDTHS)))

    def device_draft(self, context: Context, plan: Plan) -> DeviceDraft:
        self.unread.add(context)
        return self.unread.device_draft(
            self.head, self.head, context, self.tree, at_once=self.width, slots=READ_WIDTHS[-1]
        )
