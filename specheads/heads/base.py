"""A draft head: a config, a loss over tapped features, and a drafter.

Shapes: B batch rows, T positions, F tapped features, H hidden, V vocabulary, Vd draft vocabulary, S drafted depths,
R' starts with all S drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.planner import STATIC_DEPTH, NoDraft, Plan, StaticTree, static_choices
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.tree.draft_logits import DraftIds
from specheads.heads import draws
from specheads.heads.limits import DEEPEST, check_choices, check_options
from specheads.losses.functions import parse_loss
from specheads.losses.objective import Objective, Scores
from specheads.losses.targets import DraftTargets
from specheads.losses.teacher import Teacher
from specheads.options import refuse_unknown

T = TypeVar("T")


@dataclass(frozen=True)
class HeadConfig:
    """Options of a head. `with_base_defaults` takes each size that is None from the base's config.

    loss: one of `losses.functions.DISTRIBUTION_LOSSES`, 'hard', or a weighted sum such as 'hard:0.1,tv:1.8'.
    dpace: the floor of D-PACE's position weights (0.5 as published); None weights by depth alone.
    tree: the default static tree, as text ("chain:4") or as choices, each a path of ranks, as found by
      `calibration.calibrate_tree`; None: the usual tree of this kind of head on the device.

    A subclass sets `kind`, adds its options as fields and their `bounds`, and overrides the properties below where they
    differ.
    """

    kind: ClassVar[str] = ""
    title: ClassVar[str] = ""  # in a model card; "" for the kind
    loss_terms: ClassVar[tuple[str, ...]] = ()  # reported by `loss` besides those of every head
    aliases: ClassVar[dict[str, str]] = {}  # other spellings of options → their names here
    unrecorded: ClassVar[dict[str, Any]] = {}  # options older checkpoints lack → their value there, if not the default
    bounds: ClassVar[dict[str, tuple[float, float]]] = {  # least and greatest value; added to those of base classes
        "hidden_size": (1, 2**20), "vocab_size": (1, 2**24), "dpace": (0, 1),
    }  # fmt: skip

    hidden_size: int | None = None
    vocab_size: int | None = None
    loss: str = "ce"
    dpace: float | None = None
    tree: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tree, str | StaticTree):
            object.__setattr__(self, "tree", static_choices(self.tree, self.fixed_depth or STATIC_DEPTH))
        check_options(self)
        parse_loss(self.loss)
        if self.tree is not None:
            check_choices(self.kind, self.tree, self.max_depth, self.output_size)
            object.__setattr__(self, "tree", StaticTree(self.tree).choices)  # ValueError if the choices form no tree

    @property
    def max_depth(self) -> int:
        """Tokens of the longest draft."""
        return DEEPEST

    @property
    def fixed_depth(self) -> int | None:
        """How many depths are drafted, if each has a network of its own; None if one network drafts every depth."""
        return None

    @property
    def served_depth(self) -> int:
        """Tokens of a draft when another program serves the head."""
        return self.max_depth

    @property
    def output_size(self) -> int | None:
        """The size of the draft vocabulary, Vd; None until the sizes are filled in."""
        return self.vocab_size

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """From options by name, other toolkits' spellings included. ValueError for an unknown one."""
        refuse_unknown(options, [*(f.name for f in fields(cls)), *cls.aliases], what=f"{cls.kind} head option")
        values: dict[str, Any] = {}
        for name, value in options.items():
            key = cls.aliases.get(name, name)
            if key in values:
                raise ValueError(f"{cls.kind} head option {key!r} is given twice (once as {name!r})")
            values[key] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def with_base_defaults(self, base_config: Any) -> Self:
        """A copy whose missing sizes are taken from the base's text config."""
        defaults = {"hidden_size": base_config.hidden_size, "vocab_size": base_config.vocab_size}
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}}


@dataclass(frozen=True, slots=True)
class TapBatch:
    """A batch with the base's features and probabilities, live or from disk: a head cannot tell which.

    tokens (B, T). features (B, T, F): the tapped layers. teacher: the base's distribution of token t + 1 at position t.
    supervised (B, T) bool, indexed by the predicted token. documents (B, T): ids, 0 at padding. position_ids (B, T).
    embed, lm_head: the base's, frozen.
    num_items: what summed losses are divided by, given under gradient accumulation and with several processes; None:
      the supervised tokens of this batch.
    seed: of the random draws, a different one at each step of a run; None draws one from torch's generator.
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

    @property
    def denominator(self) -> Tensor | float:
        items = self.supervised.sum() if self.num_items is None else self.num_items
        return items.clamp_min(1) if isinstance(items, Tensor) else max(items, 1)

    def targets(self, depths: int) -> DraftTargets:
        """The supervised positions, and where their drafts of each depth started."""
        return DraftTargets.from_batch(self.tokens, self.supervised, self.documents, depths)

    def keys(self) -> Tensor:
        """(B, T) int64 keys of random numbers, see `draws`; a row's keys do not depend on its batch."""
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        return draws.keys(self.tokens, self.documents, seed)


class DraftHead(nn.Module, Drafter, ABC):
    """A module that learns to draft, and a drafter.

    A subclass sets `Config` and implements
      training: `layers`, `loss`, `draft_logits`, `output_parameters`, `scored_depths`;
      drafting: `usual_plan`, `propose`.
    It overrides the others where their defaults do not hold: `attends`, `target_ids`, `passes`, `unrolled_starts`,
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
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """The base's hidden_states that it reads, as Hugging Face indices: 0 embeddings, n after the final norm; n + 1:
        the last layer's output before it."""

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
        """See HeadConfig.fixed_depth."""
        return self.config.fixed_depth

    @property
    def max_depth(self) -> int:
        """See HeadConfig.max_depth."""
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

    def unrolled_starts(self, length: int) -> int:
        """How many queries a row of `length` tokens has in all training-time-test steps after the first."""
        return 0

    def refuse_unfit(self, base: Any) -> None:
        """Raise UnsupportedModel if this kind of head cannot learn from this base."""

    def copy_frozen_weights(self, base: nn.Module) -> None:
        """Copy the base's weights that the head holds but does not train. It cannot draft without them."""

    def initialise(self, base: nn.Module) -> None:
        """Start from weights of the base, where shapes match."""

    @abstractmethod
    def draft_logits(self, hidden: Tensor, depth: int, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """The head's output at a depth (…, H) → logits (…, Vd). lm_head is the base's."""

    @abstractmethod
    def output_parameters(self) -> list[Tensor]:
        """The head's parameters that `draft_logits` uses."""

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
    ) -> Scores:
        """Score drafts against the base by the config's loss. rows: the outputs of each draft s, (R_s, H). overlaps:
        compute α in training too."""
        assert self.config.vocab_size is not None
        objective = Objective(parse_loss(self.config.loss), depth_weights, self.config.dpace)
        return objective(
            targets,
            batch.teacher,
            rows,
            lambda hidden, depth: self.draft_logits(hidden, depth, batch.lm_head),
            self.output_parameters(),
            self.draft_ids,
            vocab_size=self.config.vocab_size,
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
