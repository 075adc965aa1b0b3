"""decode(): the only loop. One step drafts a tree, verifies it in one pass, and keeps what the rule accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers.utils import logging as hf_logging

from specheads.accept import Acceptance, walk
from specheads.draft_law import LawKept
from specheads.drafters.base import Context, Drafter
from specheads.model_inputs import ModelInputs
from specheads.planner import Idle, Plan, limited
from specheads.processors import PREFIX_ONLY
from specheads.sampling import Sampler
from specheads.target import Target
from specheads.tree import DraftTree

logger = hf_logging.get_logger(__name__)
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
    watch = StateWatch(sampler) if plan else None
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
        # How many tokens each row may still gain.
        left = [
            max_new_tokens - len(history) + len(prompt) if going else 0
            for history, prompt, going in zip(context.history, prompts, running, strict=True)
        ]
        tree = DraftTree.root_only(context.root)
        if drafter and plan and max(left) > 1:
            own = Idle(plan) if watch and watch.waiting else limited(plan, max(left) - 1)
            drafted_tree = drafter.propose(context, sampler, own)
            tree = tree if isinstance(own, Idle) else drafted_tree
        if accept.needs_draft_law and tree.logits is None and tree.num_nodes > 1:
            raise ValueError(
                f"{type(accept).__name__} compares the draft's law with the target's, and {type(drafter).__name__} "
                "gives none; draft with a head or a draft model, or accept by another rule"
            )
        target.active = active = None if all(running) else torch.tensor(running, device=root.device)
        out = target.verify(tree)
        ends = None if end_ids is None else ended(tree, end_ids, left)
        verdict = walk(tree, out.logits, accept, sampler, context.history, ends=ends, keep_scores=keep_scores)
        if watch and not watch.still(sampler):
            plan = watch = None
        if active is not None:  # a finished row stays where it is
            verdict = replace(verdict, length=verdict.length * active)
        following, ranks_of_path = verdict.following(tree), tree.shape.ranks.gather(1, verdict.path)
        # The step's only transfer to the host: tokens gained, ranks, nodes drafted and length.
        numbers = torch.cat([following, ranks_of_path, tree.shape.num_drafted, verdict.length.unsqueeze(1)], 1).tolist()
        width = following.shape[1]
        gained = [row[: row[-1]] for row in numbers]
        accepted = [max(0, row[-1] - 1) for row in numbers]
        drafted = [row[-2] if going else 0 for row, going in zip(numbers, running, strict=True)]
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


class StateWatch:
    """Watches whether logits processors of unknown kinds change from call to call, before anything is drafted.

    waiting: is that not known yet? Until then no draft is made, so that each is asked once a token, as by
    `generate()`.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.waiting = bool(sampler.unproven)
        self.seen = sampler.state() if self.waiting else None

    def still(self, sampler: Sampler) -> bool:
        """After a step: may drafts be made from here on? Says once, in the log, where they may not."""
        if not self.waiting:
            return True
        self.waiting = False
        if self.seen is not None and self.seen == sampler.state():
            return True
        names = ", ".join(sorted({type(processor).__name__ for processor in sampler.unproven}))
        logger.warning(
            "%s keeps state from call to call, or may, and cannot judge drafts: decoding goes on without them. If its "
            "result depends on the ids and scores of each call alone, give it an attribute %s = True", names,
            PREFIX_ONLY,
        )  # fmt: skip
        return False


def ended(tree: DraftTree, end_ids: Tensor, left: list[int]) -> Tensor:
    """(B, N) the nodes that nothing follows: at or below one of end_ids (E,) or the last token a row may gain.

    left: how many tokens each row may gain after its root, 0 where it has ended.
    """
    room = torch.tensor(left, device=tree.tokens.device).unsqueeze(1)
    last = (tree.shape.depth >= room) | (torch.isin(tree.tokens, end_ids) & tree.shape.drafted)
    return (tree.shape.ancestors & last.unsqueeze(1)).any(2)


def top_tokens(logits: Tensor, count: int) -> Tensor | None:
    """(B, N, V) → the ids (B, N, K) of the `count` largest, best first; None for none."""
    return logits.topk(min(count, logits.shape[-1]), dim=-1).indices if count else None
