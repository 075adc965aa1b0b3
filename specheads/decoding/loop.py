"""decode(): the only loop. One step drafts a tree, verifies it in one pass, and keeps what the rule accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specheads.decoding.acceptance import Acceptance, Verdict, walk
from specheads.decoding.drafters.base import Context, Drafter, with_defaults
from specheads.decoding.planner import Idle, Plan
from specheads.decoding.planner.record import RecordDraftLogits
from specheads.decoding.processors import StateWatch
from specheads.decoding.sampler import Sampler
from specheads.decoding.target.causal import Target
from specheads.decoding.target.model_inputs import ModelInputs
from specheads.decoding.tree import DraftTree
from specheads.decoding.turn import ended, next_turn

Stop = Callable[[int, list[int], int], int]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave. Step 0 is the prefill: one token a row, nothing drafted.

    tokens: per row the tokens gained (none for a finished row); accepted: per row how many of them were drafted;
    ranks: per row the rank of each accepted token among its siblings; drafted: per row the nodes below the root;
    seconds: wall time; scores: per row and token its raw logits and processed scores (V,), where kept.

    Where divergences were asked for, by row, node i + 1 being the i-th drafted one and 0 the root: divergences[b][i],
    the rule's D between draft and target where that node's token was drafted (in a chain: at that position; siblings
    share theirs; NaN where there is none), parents[b][i], the node above it, and path[b], the nodes accepted.
    """

    tokens: list[list[int]]
    accepted: list[int]
    ranks: list[list[int]]
    drafted: list[int]
    seconds: float
    scores: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    divergences: list[list[float]] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
    path: list[list[int]] = field(default_factory=list)


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
    keep_divergences: bool = False,
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
    # One number a row and token of its text, whatever is drafted: so the same seed gives the text it gives undrafted.
    numbers = sampler.uniforms((batch, max_new_tokens), out.logits.device) if sampler.do_sample else None
    root = sampler.draw(sampler.probs_of(scores), None if numbers is None else numbers[:, 0])
    drafter = None if drafter is None else with_defaults(drafter)
    wanted = 0 if drafter is None else drafter.wants_target_top
    context = Context.start(target, ids, lengths, out.features, root, top_tokens(out.logits, wanted))
    refuse_broken_laws(bool(sampler.finite))
    running, count = [True] * batch, torch.ones_like(root)  # (B,) tokens gained
    if plan and (accept.uses_draft_probs or keep_divergences):
        plan = RecordDraftLogits(plan)
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
        if accept.requires_draft_probs and tree.logits is None and tree.num_nodes > 1:
            raise ValueError(
                f"{type(accept).__name__} compares the draft's law with the target's, and {type(drafter).__name__} "
                "gives none; draft with a head or a draft model, or accept by another rule"
            )
        target.active = active = None if all(turn.going) else torch.tensor(turn.going, device=root.device)
        out = target.verify(tree)
        ends = None if end_ids is None else ended(tree, end_ids, turn.left)
        verdict = walk(
            tree, out.logits, accept, sampler, context.history, ends=ends, keep_scores=keep_scores,
            numbers=None if numbers is None else ahead(numbers, count, tree.max_depth + 1),
            keep_divergences=keep_divergences,
        )  # fmt: skip
        if watch and not watch.still():
            plan = watch = None
        if active is not None:  # a row that has finished, or waits, stays where it is
            bonus = torch.where(active, verdict.bonus, context.root)
            verdict = replace(verdict, length=verdict.length * active, bonus=bonus)
        count = count + verdict.length
        following, ranks_of_path = verdict.following(tree), tree.topology.ranks.gather(1, verdict.path)
        # The step's only transfer to the host: tokens gained, ranks, were the laws finite, nodes drafted and length.
        finite, num_drafted = sampler.finite.to(root.device).expand(batch, 1), tree.topology.num_drafted
        rows = torch.cat([following, ranks_of_path, finite, num_drafted, verdict.length.unsqueeze(1)], 1).tolist()
        refuse_broken_laws(all(row[-3] for row in rows))
        width = following.shape[1]
        gained = [row[: row[-1]] for row in rows]
        accepted = [max(0, row[-1] - 1) for row in rows]
        drafted = [row[-2] if going else 0 for row, going in zip(rows, turn.going, strict=True)]
        ranks = [row[width + 1 : width + row[-1]] for row in rows]
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
        judged = divergences_of(tree, verdict, turn.going, accepted) if keep_divergences else ([], [], [])
        yield Step(tokens, accepted, ranks, drafted, time.perf_counter() - began, kept, *judged)


def divergences_of(
    tree: DraftTree, verdict: Verdict, going: Sequence[bool], accepted: Sequence[int]
) -> tuple[list[list[float]], list[list[int]], list[list[int]]]:
    """The last three fields of a Step, of `accepted` nodes a row; empty for rows that are not `going`."""
    apart = torch.full(tree.tokens.shape, torch.nan) if verdict.divergences is None else verdict.divergences
    divergences, parents, paths = [], [], []
    rows = zip(apart.tolist(), tree.parents.tolist(), verdict.path.tolist(), going, accepted, strict=True)
    for row, above, path, goes, count in rows:
        drafted = [slot for slot, parent in enumerate(above) if parent >= 0 and goes]  # other slots are unused
        number = {0: 0} | {slot: i for i, slot in enumerate(drafted, start=1)}
        divergences.append([row[slot] for slot in drafted])
        parents.append([number[above[slot]] for slot in drafted])
        paths.append([number[slot] for slot in path[1 : count + 1]])
    return divergences, parents, paths


def refuse_broken_laws(finite: bool) -> None:
    """ValueError unless all laws that were drawn from had a finite sum."""
    if not finite:
        raise ValueError(
            "a law that a token was drawn from has no finite sum: the model's logits are not finite numbers"
        )


def ahead(numbers: Tensor, count: Tensor, width: int) -> Tensor:
    """(B, T) a number a token → (B, width) those of the tokens behind the first count (B,) of each row."""
    index = count.unsqueeze(1) + torch.arange(width, device=count.device)
    return numbers.gather(1, index.clamp(max=numbers.shape[1] - 1))  # past the limit nothing is kept


def draft(drafter: Drafter | None, context: Context, sampler: Sampler, plan: Plan | None) -> DraftTree:
    """The drafter's tree, or the root alone: without a drafter or a plan, and where the plan is to draft nothing."""
    if drafter is None or plan is None:
        return DraftTree.root_only(context.root)
    tree = drafter.propose(context, sampler, plan)  # which reads the text, whatever it drafts
    return DraftTree.root_only(context.root) if isinstance(plan, Idle) else tree


def top_tokens(logits: Tensor, count: int) -> Tensor | None:
    """(B, N, V) → the ids (B, N, K) of the `count` largest, best first; None for none."""
    return logits.topk(min(count, logits.shape[-1]), dim=-1).indices if count else None
