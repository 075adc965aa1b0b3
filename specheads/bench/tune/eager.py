"""The cost of eager steps: verification by nodes and context length, drafting by levels, and the loop.

Each is timed in real steps of decode() with dummy drafts, of which only the shape matters, not the tokens.
Shapes: B batch rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specheads.bench.tune.timing import (
    Dummy,
    TimedTarget,
    TuneConfig,
    fastest_round,
    fitting_lengths,
    lookup_ms,
    random_prompts,
    wait_for,
)
from specheads.decoding.acceptance import Exact
from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.drafters.pending import PendingFeatures
from specheads.decoding.loop import decode
from specheads.decoding.planner import NoDraft, Plan, chain
from specheads.decoding.planner.by_cost import Curve, StepCosts
from specheads.decoding.planner.plan import ReserveSlots
from specheads.decoding.planner.static import parallel_chains
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.heads import DraftHead
from specheads.terminal import Report

READS = (1, 4, 16, 64)  # positions that a head reads at once
WIDTHS = (1, 2, 4, 8)  # nodes in a level
CHAIN = 4  # levels timed together, to get the time of one
SLOTS = 64
UNTIMED = 1  # warm-up steps after the prompt


def tune_eager(base: PreTrainedModel, head: DraftHead | None, config: TuneConfig, report: Report | None) -> StepCosts:
    """Time verification by nodes and length, drafting by levels and unread positions, and the rest of the loop."""
    reads = () if head is None else READS
    widths = () if head is None or head.max_depth < 2 else WIDTHS
    lengths = fitting_lengths(base, config, reads, UNTIMED)
    verified = [(length, nodes) for length in lengths for nodes in config.nodes]
    jobs: list[tuple[str, int, int]] = [("verify", *one) for one in verified]
    jobs += [("read", lengths[0], count) for count in reads] + [("level", lengths[0], width) for width in widths]
    times: dict[tuple[str, int, int], list[list[tuple[float, float]]]] = {job: [] for job in jobs}
    for number in range(config.rounds * len(jobs)):
        job = jobs[number % len(jobs)]
        if report:
            report(number / len(jobs) / config.rounds, f"{job[0]} {job[2]} after {job[1]} tokens")
        times[job].append(_timed(base, head, config, *job))
    if report:
        report(1.0, f"{len(jobs)} measurements of {config.rounds * config.steps} steps")
    first, last = (
        {job: fastest_round([[pair[i] for pair in pairs] for pairs in rounds]) for job, rounds in times.items()}
        for i in (0, 1)
    )
    verify = {
        length: Curve.fit((nodes, first["verify", length, nodes]) for at, nodes in verified if at == length)
        for length in lengths
    }
    loop = Curve.fit((nodes, median(last["verify", length, nodes] for length in lengths)) for nodes in config.nodes)
    read = Curve.fit((count, first["read", lengths[0], count]) for count in reads) if reads else None
    level = None
    if read is not None and head is not None:
        drafted = [(width, max(0.0, first["level", lengths[0], width] - read(1)) / _levels(head)) for width in widths]
        level = Curve.fit(drafted or [(1, 0.0)])  # a head with one level never drafts a second
    lookup = Curve.fit((length, lookup_ms(length, config.batch)) for length in lengths)
    return StepCosts(config.batch, verify, loop, lookup, read, level)


def _timed(
    base: PreTrainedModel, head: DraftHead | None, config: TuneConfig, kind: str, length: int, count: int
) -> list[tuple[float, float]]:
    """Two times in milliseconds for each step: of the verify pass and the loop ("verify"), else of drafting, and 0."""
    drafter: Dummy | _Timed
    if kind == "verify":
        drafter, plan = Dummy(() if head is None else head.layers, count), chain(max(2, count) - 1)
    else:
        assert head is not None
        tree: Plan = chain(1) if kind == "read" else parallel_chains(count, _levels(head) + 1)
        drafter, plan = _Timed(head, tree, count if kind == "read" else 1), chain(1)
    target = TimedTarget(base, drafter.layers, scratch=plan.num_nodes)
    every = drafter.every if isinstance(drafter, _Timed) else 1
    device: Any = target.device
    ids = random_prompts(base, config.batch, length)
    new = config.new_tokens(count if kind == "read" else plan.num_nodes, UNTIMED)
    steps = decode(
        target, drafter, ids.to(device), torch.full((config.batch,), length, device=device), plan=plan,
        sampler=Sampler(), accept=Exact(), stop=lambda row, text, count: -1, max_new_tokens=new,
    )  # fmt: skip
    next(steps)
    times = []
    for number, step in enumerate(_limited(steps, (config.steps + UNTIMED) * every)):
        if number < UNTIMED * every:
            continue  # warms up
        if kind == "verify":
            verify = target.seconds
            times.append((verify * 1e3, max(0.0, step.seconds - verify - drafter.seconds) * 1e3))
        elif drafter.seconds:
            times.append((drafter.seconds * 1e3, 0.0))
    return times


def _limited(steps: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        yield next(steps)


def _levels(head: DraftHead) -> int:
    """The number of levels beyond the first that are timed together."""
    return min(CHAIN, head.max_depth) - 1


class _Timed(Drafter):
    """Lets a head draft at every n-th step, after n unread positions, but discards its drafts. seconds: of the last
    draft; 0 at the steps between."""

    def __init__(self, head: DraftHead, tree: Plan, every: int) -> None:
        self.head, self.every, self.seconds = head, every, 0.0
        self.plan = ReserveSlots(tree, SLOTS)
        self.unread = PendingFeatures()
        self.step = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return self.head.layers

    @property
    def draft_modules(self) -> tuple[nn.Module, ...]:
        return (self.head,)

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return chain(1)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        self.unread.add(context)
        self.seconds = 0.0
        if self.step == 0:  # the prompt, which is not part of a step
            self.unread.propose(self.head, context, sampler, NoDraft(self.plan))
        elif self.step % self.every == 0:
            wait_for(context.root.device)
            began = time.perf_counter()
            self.unread.propose(self.head, context, sampler, self.plan)
            wait_for(context.root.device)
            self.seconds = time.perf_counter() - began
        self.step += 1
        return DraftTree.root_only(context.root)
