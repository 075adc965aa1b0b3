"""The cost of eager steps: verification by nodes and context length, drafting by levels, and the loop.

Each is timed in real steps of decode() with dummy drafts, of which only the shape matters, not the tokens.
Shapes: B batch rows.
"""

from __future__ import annotations

import time
from itertools import islice
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
from specheads.decoding.acceptance import Exact, TopN
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
ALL = TopN(n=2**31, margin=1.0)  # accepts every draft, so that a step leaves a head as many unread positions
SAID = {"verify": "a pass over {} nodes", "read": "a head's pass over {} positions", "level": "levels of {} drafts"}


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
            report(number / len(jobs) / config.rounds, f"{SAID[job[0]].format(job[2])} after {job[1]} tokens")
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
    dummy = Dummy(() if head is None else head.layers, 1 if kind == "level" else count)
    drafter: Dummy | _Timed = dummy
    if kind != "verify":
        assert head is not None
        drafter = _Timed(head, chain(1) if kind == "read" else parallel_chains(count, _levels(head) + 1), dummy)
    plan = dummy.default_plan(base.device, do_sample=False)
    target = TimedTarget(base, dummy.layers, scratch=plan.num_nodes)
    device: Any = target.device
    ids = random_prompts(base, config.batch, length)
    steps = decode(
        target, drafter, ids.to(device), torch.full((config.batch,), length, device=device), plan=plan,
        sampler=Sampler(), accept=Exact() if kind == "verify" else ALL, stop=lambda row, text, count: -1,
        max_new_tokens=config.new_tokens(plan.num_nodes, UNTIMED),
    )  # fmt: skip
    times = []
    for step in islice(steps, 1 + UNTIMED, 1 + UNTIMED + config.steps):  # the prompt comes first
        if kind == "verify":
            loop = max(0.0, step.seconds - target.seconds - drafter.seconds)
            times.append((target.seconds * 1e3, loop * 1e3))
        else:
            times.append((drafter.seconds * 1e3, 0.0))
    return times


def _levels(head: DraftHead) -> int:
    """The number of levels beyond the first that are timed together."""
    return min(CHAIN, head.max_depth) - 1


class _Timed(Drafter):
    """Lets a head draft after each step, but returns the dummy's drafts. seconds: taken by the head's last draft."""

    def __init__(self, head: DraftHead, tree: Plan, dummy: Dummy) -> None:
        self.head, self.dummy, self.seconds = head, dummy, 0.0
        self.plan = ReserveSlots(tree, SLOTS)
        self.unread = PendingFeatures()

    @property
    def layers(self) -> tuple[int, ...]:
        return self.head.layers

    @property
    def draft_modules(self) -> tuple[nn.Module, ...]:
        return (self.head,)

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return self.dummy.default_plan(device, do_sample)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        self.unread.add(context)
        wait_for(context.root.device)
        began = time.perf_counter()
        # The first pass reads the prompt, which is not part of a step.
        self.unread.propose(self.head, context, sampler, self.plan if self.unread.has_read else NoDraft(self.plan))
        wait_for(context.root.device)
        self.seconds = time.perf_counter() - began
        return self.dummy.propose(context, sampler, plan)
