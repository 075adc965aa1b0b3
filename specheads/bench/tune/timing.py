"""What all measurements of step costs share: options, prompts and dummy drafts.

Shapes: B batch rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.drafters.base import Context, DeviceDraft, Drafter
from specheads.decoding.drafters.lookup import longest_match, to_text
from specheads.decoding.planner import Plan, chain
from specheads.decoding.planner.by_cost.candidates import COMPILED_COPIES
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.hf_base import text_config
from specheads.decoding.verify.verifier import TargetOutput

NODES = (1, 2, 4, 8, 16, 32, 64)
COMPILED_NODES = (1, *(1 + n for n in COMPILED_COPIES))


def fastest_round(rounds: Sequence[Sequence[float]]) -> float:
    """The smallest of the rounds' medians: other programs on the machine make it slower, never faster."""
    return min(map(median, rounds))


@dataclass(frozen=True)
class TuneConfig:
    """nodes: numbers of nodes per row, including the root, to time a pass with (empty: the usual ones); lengths: of the
    context, in tokens, shortened to fit the base. Both are sorted, without duplicates. rounds: in each, everything is
    timed in turn; steps: timed in each round; compile: time compiled steps, by torch's default backend or this one."""

    batch: int = 1
    nodes: tuple[int, ...] = ()
    lengths: tuple[int, ...] = (128, 1024)
    rounds: int = 3
    steps: int = 5
    compile: bool | str = False

    def __post_init__(self) -> None:
        if not self.nodes:
            object.__setattr__(self, "nodes", COMPILED_NODES if self.compile else NODES)
        for name in ("batch", "rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("nodes", "lengths"):
            values = tuple(sorted({*getattr(self, name)}))
            object.__setattr__(self, name, values)
            if not values or min(values) < 1:
                raise ValueError(f"{name}={list(values)} must hold one number or more, each at least 1")
        if 1 not in self.nodes:
            raise ValueError(f"nodes={list(self.nodes)} must hold 1, a plain step, which all others are compared with")

    def new_tokens(self, width: int, untimed: int) -> int:
        """New tokens of the timed steps and `untimed` ones before them, if each gains `width` tokens."""
        return (self.steps + untimed) * width + 2


def fitting_lengths(base: PreTrainedModel, config: TuneConfig, others: Sequence[int], untimed: int) -> list[int]:
    """The context lengths, shortened where the steps after them would not fit the base's positions.

    others: widths of further steps, as for `new_tokens`, besides config.nodes. ValueError if there is no room for a
    context.
    """
    most = getattr(text_config(base), "max_position_embeddings", None)
    if most is None:
        return list(config.lengths)
    widest = max((2, config.nodes[-1], *others))
    room = config.new_tokens(widest, untimed)
    if most <= room:
        raise ValueError(
            f"nodes={list(config.nodes)} and steps={config.steps} take {room} tokens after the context, and the base "
            f"has {most} positions; give fewer steps{'' if widest in others else ' or fewer nodes'}"
        )
    return sorted({min(length, most - room) for length in config.lengths})


def random_prompts(base: PreTrainedModel, batch: int, length: int) -> Tensor:
    return torch.randint(0, text_config(base).vocab_size, (batch, length), generator=torch.Generator())


def lookup_ms(length: int, batch: int) -> float:
    """Milliseconds of a prompt lookup that finds nothing, the slowest case."""
    text, taken = to_text(range(3, 3 + length)), []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(batch):
            longest_match(text, 32)
        taken.append((time.perf_counter() - began) * 1e3)
    return median(taken)


class Dummy(Drafter):
    """Drafts the same chain at each step. seconds: taken by the last draft."""

    def __init__(self, layers: tuple[int, ...], nodes: int) -> None:
        self._layers, self.nodes, self.seconds = layers, nodes, 0.0
        self.chain: Tensor | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layers

    @property
    def tree_sizes(self) -> tuple[int, ...]:
        return (self.nodes,)

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return chain(max(2, self.nodes) - 1)

    def device_draft(self, context: Context, plan: Plan) -> DeviceDraft | None:
        return DeviceDraft(context) if self.nodes == 1 else None

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


def wait_for(device: Any) -> None:
    """Wait until the device has finished its queued work; a clock read earlier would show too little."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TimedTarget(Target):
    """seconds: taken by the last verify pass, which must not be compiled."""

    seconds = 0.0

    def verify(self, tree: DraftTree) -> TargetOutput:
        wait_for(self.device)
        began = time.perf_counter()
        out = super().verify(tree)
        wait_for(self.device)
        self.seconds = time.perf_counter() - began
        return out
