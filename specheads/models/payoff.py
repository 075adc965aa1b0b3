"""Did drafting pay? The steps of one text by measured step costs, against plain decoding by the same costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch

from specheads.decoding.drafters import AutoDrafter, Drafter, PathDrafter
from specheads.decoding.drafters.auto import HeadUse, bundled_costs, head_watch
from specheads.decoding.planner import (
    AdaptiveChain,
    BestFirstTree,
    DynamicTree,
    NoDraft,
    Plan,
    SampledTree,
    StaticTree,
    limit_depth,
)
from specheads.decoding.planner.by_cost import CostTable
from specheads.decoding.planner.plan import unwrapped_plan
from specheads.decoding.results import Step
from specheads.heads import DraftHead
from specheads.models.costs import cost_key, cost_path
from specheads.models.named import Models

TOLERANCE = 2.0  # bundled costs count as known if a text's steps took between 1 / TOLERANCE and TOLERANCE times as long


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """How one text was written. draft: the drafter's text; plan: None for its own; steps: the prefill first; prompt,
    limit: numbers of tokens, of the prompt and of the longest text; uses: of an `AutoDrafter`'s head, as watched."""

    draft: str
    drafter: Drafter
    plan: Plan | None
    steps: Sequence[Step]
    prompt: int
    limit: int
    uses: Sequence[HeadUse] = ()
    sampled: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class KnownCosts:
    """source: for messages. bundled: measured elsewhere, so to be checked against the time that a text's steps took."""

    table: CostTable
    source: str
    bundled: bool = False


def known_costs(models: Models, text: Drafted) -> KnownCosts | None:
    """The costs of a text's steps: those in the file of `auto:FILE`, else those that `specheads tune` saved, else, on a
    CPU, the bundled ones.

    None if nothing was measured: of draft models, cascades and encoder-decoders; and of heads that draft in one pass,
    and on other devices, unless they were tuned."""
    drafting = text.drafter.head if isinstance(text.drafter, AutoDrafter) else text.drafter
    head = drafting if isinstance(drafting, DraftHead) else None
    if models.target.config.is_encoder_decoder or not (head or drafting is None or isinstance(drafting, PathDrafter)):
        return None
    kind, _, file = text.draft.partition(":")
    heads = [head] if head is not None else [None, models.drafters.get("head")]  # a base costs the same beside its head
    keys = [
        cost_key(models.target, each, compiled=text.compiled) for each in heads if isinstance(each, DraftHead | None)
    ]
    for path in [Path(file)] if kind == "auto" and file else map(cost_path, keys):
        try:
            return KnownCosts(CostTable.load(path), f"the costs in {path}")
        except FileNotFoundError:
            continue
        except (OSError, ValueError):  # a text that is written is not the moment to refuse a file
            return None
    if models.target.device.type != "cpu" or (head is not None and head.fixed_depth is not None):
        return None
    table = bundled_costs(models.target.parameters(), "cpu", compiled=text.compiled)
    return KnownCosts(table, f"the bundled costs of a {table.title}", bundled=True)


@contextmanager
def watch_head() -> Iterator[list[HeadUse]]:
    """In the block, the list gains an entry for each step that `AutoDrafter` plans."""
    uses: list[HeadUse] = []
    token = head_watch.set(uses.append)
    try:
        yield uses
    finally:
        head_watch.reset(token)


def over_plain(text: Drafted, known: KnownCosts, device: torch.device) -> float | None:
    """The speed of a text's steps over that of plain decoding, both by the known costs; None if these are not those of
    this machine and base, or the plan's levels are not known. Reading the prompt is left out."""
    costs, drafter = known.table.for_rows(1), text.drafter
    plan = text.plan or drafter.default_plan(device, text.sampled)
    sizes = (*drafter.tree_sizes, plan.num_nodes) if text.compiled else ()  # to which a step's trees are padded
    plain = spent = taken = 0.0
    written, unread = len(text.steps[0].tokens[0]), 1
    for i, step in enumerate(text.steps[1:]):
        gained, drafted, length = len(step.tokens[0]), step.drafted[0], text.prompt + written - 1
        spent += costs.step(1, min((size for size in sizes if size > drafted), default=1 + drafted), length)
        if isinstance(drafter, DraftHead):
            levels = expanded_nodes(limit_depth(plan, text.limit - written - 1))
            if levels is None:
                return None
            spent += costs.draft(1, levels[: max(0, drafted - 1)], unread)
        else:
            spent += costs.lookup(length)
        if isinstance(drafter, AutoDrafter) and i < len(text.uses) and text.uses[i].depth:
            spent += costs.draft_chain(1, *text.uses[i])
        plain += gained * costs.step(1, 1, length)
        taken += step.seconds * 1e3
        written, unread = written + gained, gained
    if not spent or (known.bundled and not 1 / TOLERANCE <= taken / spent <= TOLERANCE):
        return None
    return plain / spent


def expanded_nodes(plan: Plan) -> tuple[int, ...] | None:
    """How many nodes of each level below the root a drafter expands; None for a plan that is not one of ours."""
    match grown := unwrapped_plan(plan):
        case StaticTree():
            return grown.inner_nodes
        case BestFirstTree():
            return grown.level_beams
        case DynamicTree():
            return (grown.top_k,) * (grown.depth - 1)
        case SampledTree():
            return tuple(accumulate(grown.branches[:-1], mul))
        case AdaptiveChain():
            return (1,) * (grown.depth - 1)
        case NoDraft():
            return ()
    return None


def loss(models: Models, text: Drafted) -> str | None:
    """A line that says so if drafting made a text's steps slower by the known costs; None if not, or if unknown."""
    if (known := known_costs(models, text)) is None:
        return None
    ratio = over_plain(text, known, models.target.device)
    if ratio is None or round(ratio, 2) >= 1:
        return None
    automatic = isinstance(text.drafter, AutoDrafter)
    return f"drafting did not pay here: {ratio:.2f}× the speed of plain decoding by {known.source}; " + (
        "draft=none does not draft" if automatic else "draft=auto alone decides step by step"
    )
