"""The best static tree for a head, counted on data: by the ranks that its drafts gave to the tokens that followed.

Shapes: R starts of decoding steps, S drafted depths; ranks (R, S) as DraftHead.loss reports them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.data.batches import Collator
from specheads.decoding.planner import StaticTree, static_choices
from specheads.heads.limits import MAX_NODES
from specheads.losses.targets import ENDED
from specheads.options import OptionError

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel


@torch.no_grad()
def measure_ranks(
    model: SpecModel,
    rows: Iterable[Mapping[str, Any]],
    batch_size: int = 8,
    report: Callable[[float], None] | None = None,
    processor: Any = None,
) -> Tensor:
    """Ranks (R, S) over tokenized rows (`input_ids`, `labels`; see build_datasets), on the CPU.

    report: called with the share of rows done. processor: the base's, for rows with images. ValueError if no draft
    would gain anything.
    """
    was_training = model.training
    model.eval()
    listed, collator = [dict(row) for row in rows], Collator(0, processor=processor)
    measured = []
    for start in range(0, len(listed), batch_size):
        batch = {name: value.to(model.device) for name, value in collator(listed[start : start + batch_size]).items()}
        ranks = model(**batch).ranks
        if ranks is not None:
            measured.append(ranks.cpu())
        if report:
            report(min(1.0, (start + batch_size) / len(listed)))
    model.train(was_training)
    if not any(bool((ranks != ENDED).any()) for ranks in measured):
        raise ValueError(
            f"no position of the {len(listed)} rows was scored: drafts gain something in answers of 3 tokens or more"
        )
    return torch.cat(measured)


def calibrate_tree(ranks: Tensor, num_nodes: int, max_depth: int | None = None) -> StaticTree:
    """The static tree of `num_nodes`, including the root, with the most accepted tokens at these positions.

    A node's value is the share of positions whose true tokens have the ranks of its path. It is never above its
    parent's, so the best nodes form a tree. Counts are joint: depths are not assumed to be independent. Ranks too high
    for a default tree are left out. ValueError if no draft was ever right. After Medusa, arXiv:2401.10774, which
    multiplies accuracies.
    """
    if not 2 <= num_nodes <= MAX_NODES:
        raise OptionError(f"{{num_nodes}} must be 2, the root and one draft, to {MAX_NODES}", num_nodes=num_nodes)
    best = sorted(_path_counts(ranks[:, :max_depth]).items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    if not best:
        raise ValueError("no target token was ever among the draft's candidates: the head is untrained")
    return StaticTree(tuple(path for path, _ in best[: num_nodes - 1]))


def expected_length(tree: StaticTree | str, ranks: Tensor) -> float:
    """Accepted length of this static tree, or of its text, at these positions: tokens per step, including the base's.

    ValueError for the text of a tree that is not static.
    """
    counts = _path_counts(ranks)
    return 1 + sum(counts[choice] for choice in static_choices(tree, ranks.shape[1])) / len(ranks)


def _path_counts(ranks: Tensor) -> Counter[tuple[int, ...]]:
    """Path → the number of positions whose ranks begin with it."""
    counts: Counter[tuple[int, ...]] = Counter()
    for row, times in Counter(map(tuple, ranks.tolist())).items():
        for depth, rank in enumerate(row, start=1):
            if not 0 <= rank < MAX_NODES:
                break
            counts[row[:depth]] += times
    return counts
