"""What a step costs here: verify time over nodes and context, drafting time over levels, and the loop's own.

Each is timed in real steps of decode(), whose drafts are dummies: what they say does not matter, only their shape.
Shapes: B batch rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.acceptance import Exact
from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.drafters.suffix_search import longest_match, to_text
from specheads.decoding.drafters.unread import UnreadPositions
from specheads.decoding.loop import decode
from specheads.decoding.planner import NoDraft, Plan, StaticTree, chain
from specheads.decoding.planner.by_cost import CostTable, Curve, StepCosts
from specheads.decoding.planner.by_cost.shapes import ReserveSlots
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.target.causal import Target, TargetOutput
from specheads.decoding.target.hf_base import text_config
from specheads.decoding.tree import DraftTree
from specheads.heads import DraftHead
from specheads.models.costs import cost_key

Report = Callable[[float, str], None]
READS = (1, 4, 16, 64)  # positions that a head reads at once
WIDTHS = (1, 2, 4, 8)  # nodes of a level
CHAIN = 4  # levels over which one is timed
SLOTS = 64


@dataclass(frozen=True)
class TuneConfig:
    """nodes: per row that are timed in one pass, root included; lengths: of the context, in tokens, those that fit the
    base; rounds: in which all of it takes turns; steps: timed in each round."""

    batch: int = 1
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    lengths: tuple[int, ...] = (128, 1024)
    rounds: int = 3
    steps: int = 5

    def __post_init__(self) -> None:
        for name in ("batch", "rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("nodes", "lengths"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name}={list(values)} must hold one number or more, each at least 1")
        if 1 not in self.nodes:
            raise ValueError(f"nodes={list(self.nodes)} must hold 1, a plain step, which all others are compared with")


@torch.inference_mode()
def tune(base: PreTrainedModel, head: DraftHead | None, config: TuneConfig, report: Report | None = None) -> CostTable:
    """Measure the step costs of a base, and of its head, for one batch size. Takes seconds to minutes."""
    most = getattr(text_config(base), "max_position_embeddings", None) or max(config.lengths)
    room = (config.steps + 1) * max(config.nodes) + 1
    lengths = sorted({min(length, most - room) for length in config.lengths})
    if lengths[0] < 1:
        raise ValueError(f"nodes={list(config.nodes)} and steps={config.steps} do not fit the base's {most} positions")
    verified = [(length, nodes) for length in lengths for nodes in sorted({*config.nodes})]
    reads, widths = (READS, WIDTHS) if head is not None else ((), ())
    jobs: list[tuple[str, int, int]] = [("verify", *one) for one in verified]
    jobs += [("read", lengths[0], count) for count in reads] + [("level", lengths[0], width) for width in widths]
    times: dict[tuple[str, int, int], list[tuple[float, float]]] = {job: [] for job in jobs}
    for number in range(config.rounds * len(jobs)):
        job = jobs[number % len(jobs)]
        if report:
            report(number / len(jobs) / config.rounds, f"{job[0]} {job[2]} after {job[1]} tokens")
        times[job] += _timed(base, head, config, *job)
    if report:
        report(1.0, f"{len(jobs)} measurements of {config.rounds * config.steps} steps")
    first, last = ({job: median(pair[i] for pair in pairs) for job, pairs in times.items()} for i in (0, 1))
    verify = {
        length: Curve.fit((nodes, first["verify", length, nodes]) for at, nodes in verified if at == length)
        for length in lengths
    }
    loop = Curve.fit((nodes, median(last["verify", length, nodes] for length in lengths)) for nodes in config.nodes)
    read = Curve.fit((count, first["read", lengths[0], count]) for count in reads) if reads else None
    level = None
    if read is not None and head is not None:
        levels = _levels(head)
        level = Curve.fit((width, max(0.0, first["level", lengths[0], width] - read(1)) / levels) for width in widths)
    lookup = Curve.fit((length, _lookup_ms(length, config.batch)) for length in lengths)
    costs = StepCosts(config.batch, verify, loop, lookup, read, level)
    names = {"base": str(base.name_or_path), "head": "none" if head is None else head.config.kind}
    return CostTable(cost_key(base, head), {config.batch: costs}, title="measured", names=names)


def merge(old: CostTable | None, new: CostTable) -> CostTable:
    """The new costs, with those of other batch sizes, and the acceptance, of an older table of the same key."""
    if old is None or old.key != new.key:
        return new
    return replace(new, batches={**old.batches, **new.batches}, acceptance=new.acceptance or old.acceptance)


def _timed(
    base: PreTrainedModel, head: DraftHead | None, config: TuneConfig, kind: str, length: int, count: int
) -> list[tuple[float, float]]:
    """Per step its milliseconds of interest and of the rest: of the verify pass and the loop, or of drafting and 0."""
    drafter: _Dummy | _Timed
    if kind == "verify":
        drafter, plan = _Dummy(() if head is None else head.layers, count), chain(max(2, count) - 1)
    else:
        assert head is not None
        levels = _levels(head)
        tree: Plan = chain(1) if kind == "read" else _parallel_chains(count, levels + 1)
        drafter, plan = _Timed(head, tree, count if kind == "read" else 1), chain(1)
    target = TimedTarget(base, drafter.layers, scratch=plan.num_nodes)
    every = drafter.every if isinstance(drafter, _Timed) else 1
    device: Any = target.device
    ids = torch.randint(0, text_config(base).vocab_size, (config.batch, length), generator=torch.Generator())
    new = (config.steps + 1) * every * plan.num_nodes + 2
    steps = decode(
        target, drafter, ids.to(device), torch.full((config.batch,), length, device=device), plan=plan,
        sampler=Sampler(), accept=Exact(), stop=lambda row, text, count: -1, max_new_tokens=new,
    )  # fmt: skip
    next(steps)
    found = []
    for number, step in enumerate(_limited(steps, (config.steps + 1) * every)):
        if number < every:
            continue  # warms up
        if kind == "verify":
            verify = target.seconds
            found.append((verify * 1e3, max(0.0, step.seconds - verify - drafter.seconds) * 1e3))
        elif drafter.seconds:
            found.append((drafter.seconds * 1e3, 0.0))
    return found


def _limited(steps: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        yield next(steps)


def _levels(head: DraftHead) -> int:
    """How many levels beyond the first are timed together."""
    return max(1, min(CHAIN, head.max_depth) - 1)


def _parallel_chains(width: int, depth: int) -> StaticTree:
    return StaticTree(tuple((rank, *(0,) * below) for rank in range(width) for below in range(depth)))


def _lookup_ms(length: int, batch: int) -> float:
    """A search that finds nothing, the longest there is."""
    text, taken = to_text(range(3, 3 + length)), []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(batch):
            longest_match(text, 32)
        taken.append((time.perf_counter() - began) * 1e3)
    return median(taken)


def wait_for(device: Any) -> None:
    """Until the device has computed all that it was given; a clock read before that shows less."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TimedTarget(Target):
    """seconds: of the last verify pass, which is not to be compiled."""

    seconds = 0.0

    def verify(self, tree: DraftTree) -> TargetOutput:
        wait_for(self.device)
        began = time.perf_counter()
        out = super().verify(tree)
        wait_for(self.device)
        self.seconds = time.perf_counter() - began
        return out


class _Dummy(Drafter):
    """Drafts the same chain at each step; seconds: of the last draft."""

    def __init__(self, layers: tuple[int, ...], nodes: int) -> None:
        self._layers, self.nodes, self.seconds = layers, nodes, 0.0
        self.chain: Tensor | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layers

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return chain(max(2, self.nodes) - 1)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        began = time.perf_counter()
        if self.nodes == 1:
            tree = DraftTree.root_only(context.root)
        else:
            if self.chain is None:
                self.chain = torch.ones(len(context.root), self.nodes - 1, dtype=torch.long, device=context.root.device)
                self.topology = DraftTree.chains(context.root, self.chain.tolist()).topology
            tokens = torch.cat([context.root.unsqueeze(1), self.chain], 1)
            tree = DraftTree(tokens, self.topology.parents, self.nodes - 1, topology=self.topology)
        self.seconds = time.perf_counter() - began
        return tree


class _Timed(Drafter):
    """Lets a head draft at every n-th step, after n unread positions, and verifies nothing of it; seconds: of the last
    draft, 0 at the steps between."""

    def __init__(self, head: DraftHead, tree: Plan, every: int) -> None:
        self.head, self.every, self.seconds = head, every, 0.0
        self.plan = ReserveSlots(tree, SLOTS)
        self.unread = UnreadPositions()
        self.step = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return self.head.layers

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return chain(1)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        self.unread.add(context)
        self.seconds = 0.0
        if self.step == 0:  # the prompt, which is no part of a step
            self.unread.propose(self.head, context, sampler, NoDraft(self.plan))
        elif self.step % self.every == 0:
            wait_for(context.root.device)
            began = time.perf_counter()
            self.unread.propose(self.head, context, sampler, self.plan)
            wait_for(context.root.device)
            self.seconds = time.perf_counter() - began
        self.step += 1
        return DraftTree.root_only(context.root)
