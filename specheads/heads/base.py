"""What every draft head is: a config, a loss over tapped features, and a drafter.

Shapes: B batch rows, T positions, F features, H hidden, V vocabulary, S drafted depths, R scored positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specheads.decoding.draft_ids import DraftIds
from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import Plan, StaticTree
from specheads.decoding.planner.named import STATIC_DEPTH, static_choices
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.heads import draws
from specheads.heads.limits import DEEPEST, check_choices, check_options
from specheads.losses.functions import parse_loss
from specheads.losses.objective import DraftTargets, Objective, Scores
from specheads.losses.teacher import Teacher
from specheads.options import refuse_unknown

T = TypeVar("T")


@dataclass(frozen=True)
class HeadConfig:
    """Options of a head. None means: taken from the base's config by `with_base_defaults`.

    loss: what a draft's law is trained on: one of `losses.DISTRIBUTION_LOSSES`, 'hard', or a weighted sum such as
    'hard:0.1,tv:1.8'. dpace: the floor of D-PACE's position weights (0.5 as published); None weighs by depth alone.
    tree: the static tree it drafts by default, by its text ("chain:4") or its choices, each a path of ranks, as
    `calibration.calibrate_tree` finds them; None leaves the tree to the kind of head and of device.
    """

    kind: ClassVar[str] = ""
    aliases: ClassVar[dict[str, str]] = {}
    bounds: ClassVar[dict[str, tuple[float, float]]] = {  # the least and the most; those of base classes hold too
        "hidden_size": (1, 2**20), "vocab_size": (1, 2**24), "dpace": (0, 1),
    }  # fmt: skip

    hidden_size: int | None = None
    vocab_size: int | None = None
    loss: str = "ce"
    dpace: float | None = None
    tree: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tree, str | StaticTree):
            object.__setattr__(self, "tree", static_choices(self.tree, getattr(self, "num_heads", STATIC_DEPTH)))
        check_options(self)
        parse_loss(self.loss)
        if self.tree is not None:
            vocabulary = getattr(self, "draft_vocab_size", None) or self.vocab_size
            check_choices(self.kind, self.tree, self.deepest, vocabulary)
            object.__setattr__(self, "tree", StaticTree(self.tree).choices)  # ValueError where it is no tree

    @property
    def deepest(self) -> int:
        """Tokens of its longest draft."""
        return DEEPEST

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """Options by name, the spellings of other toolkits included. ValueError on an unknown one."""
        refuse_unknown(options, [*(f.name for f in fields(cls)), *cls.aliases], what=f"{cls.kind} head option")
        given: dict[str, Any] = {}
        for name, value in options.items():
            key = cls.aliases.get(name, name)
            if key in given:
                raise ValueError(f"{cls.kind} head option {key!r} is given twice (once as {name!r})")
            given[key] = tuple(value) if isinstance(value, list) else value
        return cls(**given)

    def with_base_defaults(self, base_config: Any) -> Self:
        """With every size that was left None taken from the base's text config."""
        defaults = {"hidden_size": base_config.hidden_size, "vocab_size": base_config.vocab_size}
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}}


@dataclass(frozen=True, slots=True)
class TapBatch:
    """What the base saw, live or from disk; a head cannot tell which.

    tokens (B, T); features (B, T, F) the tapped layers; teacher: the base's law, that at t being of token t + 1;
    supervised (B, T) bool, indexed by the predicted token; documents (B, T) ids, 0 at padding; position_ids (B, T).
    embed and lm_head are the base's, frozen. num_items: what to divide summed losses by, if it is not this batch's
    own count of supervised tokens (gradient accumulation, several processes). seed: of what is drawn at random, one for
    each step of a run; None takes one from torch's generator.
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

    def asked(self, depths: int) -> DraftTargets:
        """The supervised positions, and where drafts of so many depths started for each."""
        return DraftTargets.of(self.tokens, self.supervised, self.documents, depths)

    def keys(self) -> Tensor:
        """(B, T) int64 what `draws` makes random numbers of, each row's its own in whichever batch it lies."""
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        return draws.keys(self.tokens, self.documents, seed)


class DraftHead(nn.Module, ABC):
    """A module that learns to draft. Subclasses set `Config`, and implement `loss`, `propose` and `layers`."""

    Config: ClassVar[type[HeadConfig]]

    # Set by SpecModel.gradient_checkpointing_enable: what torch's checkpoint() takes.
    checkpointing: Mapping[str, Any] | None = None
    # Tokens of the longest text it was trained on, which SpecModel sets; None: not known, or it attends to none before.
    trained_length: int | None = None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

    def maybe_checkpoint(self, function: Callable[..., T], *inputs: Any) -> T:
        """function(*inputs), whose activations are made again in the backward pass under gradient checkpointing."""
        if self.checkpointing is None or not (self.training and torch.is_grad_enabled()):
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, **self.checkpointing)

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """The base's hidden_states it is fed, as Hugging Face indices (0 embeddings, n after the final norm)."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def attends(self) -> bool:
        """Does it look at earlier positions itself, so that it matters how many it was trained on?"""
        return True

    @property
    @abstractmethod
    def scored_depths(self) -> int:
        """How many depths an evaluation scores: those that ranks and overlaps have."""

    @property
    def target_ids(self) -> Tensor | None:
        """(Vd,) the target id of each draft token; None where the vocabularies are the same."""
        return None

    @property
    def draft_ids(self) -> DraftIds | None:
        """`target_ids` and the reverse; None where the vocabularies are the same."""
        ids = self.target_ids
        if ids is None:
            return None
        assert self.config.vocab_size is not None
        return DraftIds.of(ids, self.config.vocab_size)

    def passes(self, length: int) -> float:
        """How often training on a row of so many tokens applies the head's matrices, a token."""
        return 1.0

    def refuse_unfit(self, base: Any) -> None:
        """Raise UnsupportedModel where this kind of head cannot learn from this base."""

    def copy_frozen_weights(self, base: nn.Module) -> None:
        """Copy what the head holds of the base and does not train; without it the head would be none."""

    def initialise(self, base: nn.Module) -> None:
        """Start from what the base already knows, where the shapes agree."""

    @abstractmethod
    def draft_logits(self, hidden: Tensor, depth: int, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """What the head makes at a depth, (…, H), → its logits (…, Vd). lm_head is the base's."""

    @abstractmethod
    def output_parameters(self) -> list[Tensor]:
        """The head's own parameters in `draft_logits`."""

    @abstractmethod
    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The training loss, and what to report: every loss term by name, and where a position can have all S drafts
        `ranks` (R', S), each depth's rank of the base's own next token in the draft (0 = drafted first, −1 = outside
        the draft vocabulary), and in evaluation `overlaps` (R', S), α = Σ min(p, q)."""

    def score(
        self,
        batch: TapBatch,
        asked: DraftTargets,
        rows: list[Tensor],
        depth_weights: tuple[float, ...],
        overlaps: bool = False,
    ) -> Scores:
        """Drafts `rows`, each (R, H), against the base, by the config's loss. overlaps: α in training too."""
        assert self.config.vocab_size is not None
        objective = Objective(parse_loss(self.config.loss), depth_weights, self.config.dpace)
        return objective(
            asked,
            batch.teacher,
            rows,
            lambda hidden, depth: self.draft_logits(hidden, depth, batch.lm_head),
            self.output_parameters(),
            self.draft_ids,
            vocab_size=self.config.vocab_size,
            overlaps=overlaps or not self.training,
        )

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        """The tree it drafts unless told otherwise."""
        return self.usual_plan(device) if self.config.tree is None else StaticTree(self.config.tree)

    @abstractmethod
    def usual_plan(self, device: torch.device) -> Plan:
        """The tree for a head nothing was measured of."""

    @abstractmethod
    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        """A tree behind context.root, in the shape `plan` asks for."""
