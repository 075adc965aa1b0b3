"""What Medusa and Hydra share: a small network and an output matrix for each drafted depth.

Head i at position t predicts token t + 2 + i. Shapes: B batch rows, T positions, H hidden, R_s drafts of depth s.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import Expand, Plan, default_static
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.hf_base import layer_count
from specheads.heads.base import TapBatch
from specheads.heads.limits import ANY_LAYER, MOST_LAYERS
from specheads.heads.starts.anchors import AnchoredStarts, AnchoredStartsConfig
from specheads.heads.vocabulary import DraftVocabulary, DraftVocabularyConfig
from specheads.losses.targets import DraftTargets


@dataclass(frozen=True)
class DepthHeadsConfig(AnchoredStartsConfig, DraftVocabularyConfig):
    """num_heads: depths drafted. num_layers: blocks per head. decay: the loss of head i has weight decay^i. tap: the
    layer read (default: the last, after the final norm)."""

    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        "num_heads": (1, MOST_LAYERS), "num_layers": (1, MOST_LAYERS), "tap": ANY_LAYER,
    }  # fmt: skip

    num_heads: int = 5
    num_layers: int = 1
    decay: float = 1.0
    tap: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay <= 1:
            raise ValueError(f"{self.kind} head option decay={self.decay} must be above 0 and at most 1")

    @property
    def max_depth(self) -> int:
        return self.num_heads

    @property
    def fixed_depth(self) -> int:
        return self.num_heads

    def with_base_defaults(self, base_config: Any) -> Self:
        config = super().with_base_defaults(base_config)
        layers = layer_count(base_config)
        tap = layers if config.tap is None else config.tap
        if not 0 <= tap <= layers:
            raise ValueError(
                f"{self.kind} head option tap={tap} does not exist: the base has {layers} layers, so give 0 to {layers}"
            )
        return replace(config, tap=tap)


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), initially the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class DepthHeads(DraftVocabulary):
    """A subclass defines each depth's block and its input: `draft_rows` in training, `expander` in decoding."""

    config: DepthHeadsConfig

    def __init__(self, config: DepthHeadsConfig, blocks: nn.ModuleList, output_bias: bool = False) -> None:
        super().__init__(config)
        assert config.hidden_size and config.draft_vocab_size
        size, vocab = config.hidden_size, config.draft_vocab_size
        self.blocks = blocks
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=output_bias) for _ in blocks)

    @property
    def layers(self) -> tuple[int, ...]:
        assert self.config.tap is not None
        return (self.config.tap,)

    @property
    def attends(self) -> bool:
        return False

    @property
    def scored_depths(self) -> int:
        return self.config.num_heads

    def passes(self, length: int) -> float:
        heads = self.config.num_heads
        return sum(self.config.anchored_share(length, depth) for depth in range(heads)) / heads

    def output_layers(self) -> list[nn.Linear]:
        return list(self.lm_heads)  # type: ignore[arg-type]

    def initialise(self, base: Any) -> None:
        self.copy_output_rows(base)

    def draft_logits(self, hidden: Tensor, depth: int, lm_head: Any = None) -> Tensor:
        return self.lm_heads[depth](hidden)

    @abstractmethod
    def draft_rows(self, batch: TapBatch, targets: DraftTargets) -> list[Tensor]:
        """The outputs of each head at the starts of its drafts, (R_s, H)."""

    @abstractmethod
    def expander(self, context: Context, plan: Plan) -> Expand:
        """The `expand` with which a plan grows a tree below context.root: head i scores the children of level i."""

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        targets = batch.targets(config.num_heads)
        if self.training and config.anchors is not None and config.num_heads > config.anchored_depth:
            anchored = AnchoredStarts.sample(targets, batch.keys(), config.anchors, config.anchored_depth)
            targets = anchored.select(targets)
        rows = self.draft_rows(batch, targets)
        scores = self.score(batch, targets, rows, tuple(config.decay**i for i in range(config.num_heads)))
        return scores.total / batch.denominator, scores.terms(batch.denominator)

    def usual_plan(self, device: torch.device) -> Plan:
        return default_static(64 if device.type == "cuda" else 8, self.config.num_heads)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        config = self.config
        if plan.depth > config.num_heads:
            name = config.kind.capitalize()
            raise ValueError(f"a tree {plan.depth} deep needs as many {name} heads; this model has {config.num_heads}")
        assert config.vocab_size is not None
        return plan.grow(context.root, self.expander(context, plan), sampler, config.vocab_size)
