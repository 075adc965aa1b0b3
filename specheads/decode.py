"""decode(): the only loop. One step drafts a tree, verifies it in one pass, and keeps what the rule accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specheads.accept import Acceptance, walk
from specheads.draft_law import LawKept
from specheads.drafters.base import Context, Drafter
from specheads.model_inputs import ModelInputs
from specheads.planner import Idle, Plan
from specheads.processors import StateWatch
from specheads.sampling import Sampler
from specheads.target import Target
from specheads.tree import DraftTree
from specheads.turn import ended, next_turn

Stop = Callable[[int, list[int], int], int]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave. Step 0 is the prefill: one token a row, nothing drafted.

    tokens: per row the tokens gained (none for a finished row); accepted: per row how many of them were drafted;
    ranks: per row the rank of each accepted token among its siblings; drafted: per row the nodes below the root;
    seconds: wall time; scores: per row and token its raw logits and processed scores (V,), where kept.
    """

    tokens: list[list[int]]
    accepted: list[int]
    ranks: list[list[int]]
    drafted: list[int]
    seconds: float
    scores: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)


@torch.inference_mode()  # spares each operation its autograd bookkeeping, a tenth of a step on a CPU
def decode(
    target: Target,
    drafter: Drafter | None,
    ids: Tensor,
    lengths: Tensor,
    *,
    plan: Plan | None,
    sampler: Sampler,
    accept: Acceptance,
    stop: Stop,
    max_new_tokens: int,
    inputs: ModelInputs | None = None,
    eos: Collection[int] = (),
    keep_scores: bool = False,
) -> Iterator[Step]:
    """Generate from prompts ids (B, T), packed left, of lengths (B,); yields a Step at a time until all rows stop.

    drafter None (with plan None) is plain autoregressive decoding: the same loop over root-only trees.
    stop(row, ids, count) looks at a row's ids, of which the last `count` are new, and returns how many of those to
    keep, or a negative number if the row goes on. eos: ids after which it always ends; nothing is drafted past
    max_new_tokens, and no logits processor is asked what follows either. inputs: of the model besides ids.
    """
    began = time.perf_counter()
    batch = ids.shape[0]
    out = target.prefill(ids, lengths, room=max_new_tokens, inputs=inputs)
    prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    scores = sampler.scores(out.logits[:, 0], lambda: prompts)
    root = sampler.draw(sampler.law_of(scores))
    wanted = getattr(drafter, "wants_target_top", 0)
    context = Context.start(target, ids, lengths, out.features, root, top_tokens(out.logits, wanted))
    running = [True] * batch
    if plan and accept.wants_draft_law:
        plan = LawKept(plan)
    watch = StateWatch(sampler.processors) if plan else None
    end_ids = torch.tensor(sorted(eos), dtype=ids.dtype, device=root.device) if sampler.needs_prefix else None

    def settle(gained: list[list[int]]) -> list[list[int]]:
        """Cut each row's gain where it stops, and mark the rows that did."""
        for row, tokens in enumerate(gained):
            if not tokens:
                continue
            kept = stop(row, context.history[row], len(tokens))
            if kept >= 0:
                running[row] = False
                gained[row] = tokens[:kept]
        return gained

    gained = settle([[history[-1]] for history in context.history])
    first = [[pair] for pair in zip(out.logits[:, 0], scores, strict=True)] if keep_scores else []
    yield Step(gained, [0] * batch, [[] for _ in range(batch)], [0] * batch, time.perf_counter() - began, first)

    while any(running):
        began = time.perf_counter()
        turn = next_turn(target, plan, running, context.history, prompts, max_new_tokens)
        now = Idle(turn.plan) if turn.plan and watch and watch.waiting else turn.plan
        tree = draft(drafter, context, sampler, now)
        if accept.needs_draft_law and tree.logits is None and tree.num_nodes > 1:
            raise ValueError(
                f"{type(accept).__name__} compares the draft's law with the target's, and {type(drafter).__name__} "
                "gives none; draft with a head or a draft model, or accept by another rule"
            )
        target.active = active = None if all(turn.going) else torch.tensor(turn.going, device=root.device)
        out = target.verify(tree)
        ends = None if end_ids is None else ended(tree, end_ids, turn.left)
        verdict = walk(tree, out.logits, accept, sampler, context.history, ends=ends, keep_scores=keep_scores)
        if watch and not watch.still():
            plan = watch = None
        if active is not None:  # a row that has finished, or waits, stays where it is
            bonus = torch.where(active, verdict.bonus, context.root)
            verdict = replace(verdict, length=verdict.length * active, bonus=bonus)
        following, ranks_of_path = verdict.following(tree), tree.shape.ranks.gather(1, verdict.path)
        # The step's only transfer to the host: tokens gained, ranks, nodes drafted and length.
        numbers = torch.cat([following, ranks_of_path, tree.shape.num_drafted, verdict.length.unsqueeze(1)], 1).tolist()
        width = following.shape[1]
        gained = [row[: row[-1]] for row in numbers]
        accepted = [max(0, row[-1] - 1) for row in numbers]
        drafted = [row[-2] if going else 0 for row, going in zip(numbers, turn.going, strict=True)]
        ranks = [row[width + 1 : width + row[-1]] for row in numbers]
        context = context.extend(verdict, following, out.features, gained, top_tokens(out.logits, wanted))
        target.commit(verdict.path, verdict.length, context.bound)
        tokens = settle([list(row) for row in gained])
        accepted = [min(n, len(row)) for n, row in zip(accepted, tokens, strict=True)]
        ranks = [row[:n] for n, row in zip(accepted, ranks, strict=True)]
        kept = (
            [[(raw[b], processed[b]) for raw, processed in verdict.scores[: len(row)]] for b, row in enumerate(tokens)]
            if keep_scores
            else []
        )
        yield Step(tokens, accepted, ranks, drafted, time.perf_counter() - began, kept)


def draft(drafter: Drafter | None, context: Context, sampler: Sampler, plan: Plan | None) -> DraftTree:
    """The drafter's tree, or the root alone: without a drafter or a plan, and where the plan is to draft nothing."""
    if drafter is None or plan is None:
        return DraftTree.root_only(context.root)
    tree = drafter.propose(context, sampler, plan)  # which reads the text, whatever it drafts
    return DraftTree.root_only(context.root) if isinstance(plan, Idle) else tree


def top_tokens(logits: Tensor, count: int) -> Tensor | None:
    """(B, N, V) → the ids (B, N, K) of the `count` largest, best first; None for none."""
    return logits.topk(min(count, logits.shape[-1]), dim=-1).indices if count else None
