"""A draft head: a config, a loss over tapped features, and a drafter.

Shapes: B batch rows, T positions, F tapped features, H hidden, V vocabulary, Vd draft vocabulary, S drafted depths,
R' starts with all S drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.planner import NoDraft, Plan, StaticTree
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.tree.draft_logits import DraftIds
from specheads.decoding.verify.model_inputs import BasePositions
from specheads.heads.config import HeadConfig
from specheads.heads.sampling import random_keys
from specheads.losses.objective import Project, Scores, score_drafts
from specheads.losses.targets import DraftTargets
from specheads.losses.teacher import Teacher

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TapBatch:
    """A batch with the base's features and probabilities, live or from disk: a head cannot tell which.

    tokens (B, T). features (B, T, F): the tapped layers. teacher: the base's distribution of token t + 1 at position t.
    supervised (B, T) bool, indexed by the predicted token. documents (B, T): ids, 0 at padding. position_ids (B, T).
    embed, lm_head: the base's, frozen.
    num_items: what summed losses are divided by, given under gradient accumulation and with several processes; None:
      the supervised tokens of this batch.
    seed: of the random draws, a different one at each step of a run; None draws one from torch's generator.
    progress: the share of a run that is done, for losses that change in its course; 1 in evaluation.
    base_positions: of rows with images, where the base's positions have several parts.
    """

    tokens: Tensor
    features: Tensor
    teacher: Teacher
    supervised: Tensor
    documents: Tensor
    position_ids: Tensor
    embed: Callable[[Tensor], Tensor]
    lm_head: Callable[[Tensor], Tensor]
    num_items: Tensor | float | None = None
    seed: int | None = None
    progress: float = 1.0
    base_positions: BasePositions | None = None

    @property
    def denominator(self) -> Tensor | float:
        items = self.supervised.sum() if self.num_items is None else self.num_items
        return items.clamp_min(1) if isinstance(items, Tensor) else max(items, 1)

    def targets(self, depths: int) -> DraftTargets:
        """The supervised positions, and where their drafts of each depth started."""
        return DraftTargets.from_batch(self.tokens, self.supervised, self.documents, depths)

    def keys(self) -> Tensor:
        """(B, T) int64 keys of random numbers, see `sampling`; a row's keys do not depend on its batch."""
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        return random_keys(self.tokens, self.documents, seed)


class DraftHead(nn.Module, Drafter, ABC):
    """A module that learns to draft, and a drafter.

    A subclass sets `Config` and implements
      training: `loss`, `scored_depths`, and `draft_logits`, `output_parameters` unless it drafts by the base's matrix;
      drafting: `usual_plan`, `propose`.
    It overrides the others where their defaults do not hold: `attends`, `target_ids`, `passes`,
    `refuse_unfit`, `copy_frozen_weights`, `initialise`.
    """

    Config: ClassVar[type[HeadConfig]]

    # Arguments of torch's checkpoint(), set by SpecModel.activation_checkpointing_enable; None: keep activations.
    checkpointing: Mapping[str, Any] | None = None
    # Tokens of the longest training text, set by SpecModel; None if unknown, or if the head does not attend.
    trained_length: int | None = None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

    def maybe_checkpoint(self, function: Callable[..., T], *inputs: Any) -> T:
        """function(*inputs); activation checkpointing recomputes its activations in the backward pass."""
        if self.checkpointing is None or not (self.training and torch.is_grad_enabled()):
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, **self.checkpointing)

    @property
    def layers(self) -> tuple[int, ...]:
        """The base's hidden_states that it reads, as Hugging Face indices: 0 embeddings, n after the final norm; n + 1:
        the last layer's output before it."""
        return self.config.layers

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def attends(self) -> bool:
        """Whether the head itself attends to earlier positions, so that the length of its training texts matters."""
        return True

    @property
    def on_device(self) -> bool:
        return True

    @property
    @abstractmethod
    def scored_depths(self) -> int:
        """How many depths S an evaluation scores, in ranks and overlaps."""

    @property
    def fixed_depth(self) -> int | None:
        return self.config.fixed_depth

    @property
    def max_depth(self) -> int:
        return self.config.max_depth

    @property
    def target_ids(self) -> Tensor | None:
        """(Vd,) the target id of each draft token; None if the vocabularies are the same."""
        return None

    @property
    def draft_ids(self) -> DraftIds | None:
        """`target_ids` and their inverse; None if the vocabularies are the same."""
        ids = self.target_ids
        if ids is None:
            return None
        assert self.config.vocab_size is not None
        return DraftIds.of(ids, self.config.vocab_size)

    def passes(self, length: int) -> float:
        """How often training applies the head's matrices to each token of a row of `length` tokens."""
        return 1.0

    def refuse_unfit(self, base: Any) -> None:
        """Raise UnsupportedModel if this kind of head cannot learn from this base."""

    def copy_frozen_weights(self, base: nn.Module) -> None:
        """Copy the base's weights that the head holds but does not train. It cannot draft without them."""

    def initialise(self, base: nn.Module) -> None:
        """Start from weights of the base, where shapes match."""

    def draft_logits(self, hidden: Tensor, depth: int, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """The head's output at a depth (…, H) → logits (…, Vd). lm_head is the base's."""
        return lm_head(hidden)

    def output_parameters(self) -> list[Tensor]:
        """The head's parameters that `draft_logits` uses."""
        return []

    @abstractmethod
    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The training loss, and what to report: every loss term by name; `ranks` (R', S), the rank of the base's own
        next token in the draft of each depth (0 = drafted first, −1 = outside the draft vocabulary, ENDED where the
        answer ends); and in evaluation `overlaps` (R', S), α = Σ min(p, q)."""

    def score(
        self,
        batch: TapBatch,
        targets: DraftTargets,
        rows: list[Tensor],
        depth_weights: tuple[float, ...],
        overlaps: bool = False,
        project: Project | None = None,
    ) -> Scores:
        """Score drafts against the base by the config's loss. rows: the outputs of each draft s, (R_s, H). overlaps:
        compute α in training too. project: rows → what to score; None for `draft_logits`."""
        assert self.config.vocab_size is not None
        return score_drafts(
            targets,
            batch.teacher,
            rows,
            project or (lambda hidden, depth: self.draft_logits(hidden, depth, batch.lm_head)),
            self.output_parameters(),
            self.draft_ids,
            vocab_size=self.config.vocab_size,
            loss=self.config.loss,
            depth_weights=depth_weights,
            pace=self.config.dpace,
            overlaps=overlaps or not self.training,
        )

    @property
    def refillable(self) -> bool:
        return True

    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        """Replace these rows in the head's cache, if it has one: only heads that attend do."""
        if "cache" in context.memory:
            self.propose(prompts, Sampler(), NoDraft(plan))
            read = prompts.memory["cache"]
            context.memory["cache"].replace_rows(prompts.root.new_tensor(rows), read, read.lengths - 1)

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        """The tree to draft by default."""
        return self.usual_plan(device) if self.config.tree is None else StaticTree(self.config.tree)

    @abstractmethod
    def usual_plan(self, device: torch.device) -> Plan:
        """The default tree of this kind of head, unless its config has one."""

    @abstractmethod
    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        """A tree below context.root, of the shape of `plan`."""
