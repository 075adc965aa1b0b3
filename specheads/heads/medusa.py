"""Medusa: a small network and an output matrix for each drafted depth, on the last hidden state. arXiv:2401.10774.

Head i at position t predicts token t + 2 + i. Shapes: B batch rows, T positions, H hidden, R_s drafts of depth s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import ChildLogits, Expand, Plan, default_static
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.hf_base import layer_count
from specheads.heads.base import TapBatch
from specheads.heads.config import HeadConfig
from specheads.heads.sampling import AnchoredStarts, anchored_share, check_anchors
from specheads.heads.vocabulary import DraftVocabulary, check_draft_vocabulary
from specheads.losses.targets import DraftTargets


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """loss: by default on the tokens of the text, as published.
    num_heads: depths drafted. num_layers: blocks per head. decay: the loss of head i has weight decay^i.
    tap: the layer read (default: the last, after the final norm).
    draft_vocab_size: tokens the head can draft (default: all).
    anchors, anchor_first: see AnchoredStarts.
    """

    kind: ClassVar[str] = "medusa"
    title: ClassVar[str] = "Medusa"
    aliases: ClassVar[dict[str, str]] = {"medusa_num_heads": "num_heads", "medusa_num_layers": "num_layers"}

    loss: str = "hard"
    num_heads: int = 5
    num_layers: int = 1
    decay: float = 0.8
    tap: int | None = None
    draft_vocab_size: int | None = None
    anchors: int | None = None
    anchor_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_anchors(self.kind, self.anchors, self.anchor_first, self.dpace)
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)

    @property
    def layers(self) -> tuple[int, ...]:
        return () if self.tap is None else (self.tap,)

    @property
    def fixed_depth(self) -> int:
        return self.num_heads

    @property
    def output_size(self) -> int | None:
        return self.draft_vocab_size or self.vocab_size

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        defaults = super().base_defaults(base_config)
        return {**defaults, "tap": layer_count(base_config), "draft_vocab_size": base_config.vocab_size}

    def with_base_defaults(self, base_config: Any) -> Self:
        layers = layer_count(base_config)
        if self.tap is not None and not 0 <= self.tap <= layers:
            raise ValueError(
                f"{self.kind} head option tap={self.tap} does not exist: the base has {layers} layers, so give 0 to "
                f"{layers}"
            )
        return super().with_base_defaults(base_config)


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), initially the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(DraftVocabulary):
    """A subclass with other blocks, or another input of theirs, overrides `make_block`, `draft_rows` in training and
    `expander` in decoding."""

    Config: ClassVar[type[HeadConfig]] = MedusaConfig
    config: MedusaConfig
    output_bias: ClassVar[bool] = False

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        assert config.hidden_size and config.draft_vocab_size
        size, vocab = config.hidden_size, config.draft_vocab_size
        self.blocks = nn.ModuleList(self.make_block(i) for i in range(config.num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocab, bias=self.output_bias) for _ in self.blocks)

    def make_block(self, depth: int) -> nn.Module:
        """The network of a depth, whose output (…, H) its output matrix reads."""
        assert self.config.hidden_size
        return nn.Sequential(*(ResBlock(self.config.hidden_size) for _ in range(self.config.num_layers)))

    @property
    def attends(self) -> bool:
        return False

    @property
    def scored_depths(self) -> int:
        return self.config.num_heads

    def passes(self, length: int) -> float:
        c = self.config
        return sum(anchored_share(c.anchors, c.anchor_first, length, i) for i in range(c.num_heads)) / c.num_heads

    def output_layers(self) -> list[nn.Linear]:
        return list(self.lm_heads)  # type: ignore[arg-type]

    def initialise(self, base: Any) -> None:
        self.copy_output_rows(base)

    def draft_logits(self, hidden: Tensor, depth: int, lm_head: Any = None) -> Tensor:
        return self.lm_heads[depth](hidden)

    def draft_rows(self, batch: TapBatch, targets: DraftTargets) -> list[Tensor]:
        """The outputs of each head at the starts of its drafts, (R_s, H)."""
        features = batch.features.to(self.dtype)
        return [self.maybe_checkpoint(block, targets.gather_starts(features, i)) for i, block in enumerate(self.blocks)]

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config, depth = self.config, int(not self.config.anchor_first)
        targets = batch.targets(config.num_heads)
        if self.training and config.anchors is not None and config.num_heads > depth:
            targets = AnchoredStarts.sample(targets, batch.keys(), config.anchors, depth).select(targets)
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

    def expander(self, context: Context, plan: Plan) -> Expand:
        """The `expand` with which a plan grows a tree below context.root: head i scores the children of level i."""
        dtype, ids = context.memoize("head", lambda: (self.dtype, self.target_ids))
        hidden = context.newest(context.features).to(dtype)
        depths = zip(self.blocks, self.lm_heads, strict=True)

        def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            block, lm_head = next(depths)
            return ChildLogits(lm_head(block(hidden)).unsqueeze(1), ids, width=tokens.shape[1])

        return expand
