"""EAGLE-3: three fused layers of the target, a decoder block trained on its own outputs, and a draft vocabulary.
arXiv:2503.01840."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from specheads.heads.base import TapBatch
from specheads.heads.block import copy_layer, copy_norm, decoder_layers, final_norm
from specheads.heads.feature import FeatureHead, FeatureHeadConfig
from specheads.losses import soft_cross_entropy

MAX_DRAFT_VOCAB = 32_000


@dataclass(frozen=True)
class Eagle3Config(FeatureHeadConfig):
    """steps: of training-time test; step_decay: step s weighs step_decay^s; draft_vocab_size: tokens the head can
    draft (default: the base's vocabulary, at most 32,000)."""

    kind: ClassVar[str] = "eagle3"

    steps: int = 7
    step_decay: float = 0.8
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "steps", "draft_vocab_size")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"eagle3 head option step_decay={self.step_decay} must be above 0 and at most 1")

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        taps = (2, num_layers // 2, num_layers - 3)
        if sorted(set(taps)) != list(taps) or taps[0] > num_layers:
            # Too few layers for the published choice: as far apart as they go.
            taps = (min(1, num_layers), (num_layers + 1) // 2, num_layers)
        return taps

    def filled(self, base_config: Any) -> Self:
        config = super().filled(base_config)
        assert config.vocab_size is not None
        size = config.draft_vocab_size or min(config.vocab_size, MAX_DRAFT_VOCAB)
        if size > config.vocab_size:
            raise ValueError(f"draft_vocab_size={size} exceeds the base's vocabulary of {config.vocab_size}")
        return replace(config, draft_vocab_size=size)


class Eagle3Head(FeatureHead):
    Config = Eagle3Config
    config: Eagle3Config

    d2t: Tensor  # (Vd,) int64: target id = draft id + d2t[draft id]
    t2d: Tensor  # (V,) bool: is the target token in the draft vocabulary?

    def __init__(self, config: Eagle3Config) -> None:
        assert config.hidden_size and config.vocab_size and config.draft_vocab_size and config.taps
        super().__init__(config, input_size=2 * config.hidden_size)
        size = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_draft_vocabulary(self, counts: Tensor, base: Any = None) -> None:
        """Draft the most frequent tokens: counts (V,) over the training data; ties go to the lower id.

        With `base`, lm_head starts again from the base's rows for those tokens. ValueError on counts of another size.
        """
        if counts.shape != self.t2d.shape:
            raise ValueError(f"token counts have shape {tuple(counts.shape)}, expected ({len(self.t2d)},)")
        assert self.config.draft_vocab_size is not None
        size = self.config.draft_vocab_size
        kept = counts.to(self.d2t.device).argsort(descending=True, stable=True)[:size].sort().values
        self.d2t.copy_(kept - torch.arange(size, device=kept.device))
        self.t2d.zero_()
        self.t2d[kept] = True
        if base is not None:
            self._copy_lm_head(base)

    def _copy_lm_head(self, base: Any) -> None:
        source = base.get_output_embeddings().weight
        if source.shape[-1] == self.lm_head.weight.shape[-1] and not source.is_meta:
            ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
            with torch.no_grad():
                self.lm_head.weight.copy_(source[ids.to(source.device)])

    def initialise(self, base: Any) -> None:
        """lm_head and final norm from the base's; the block from its last layer; fc passing the highest tap through."""
        assert self.config.hidden_size is not None
        self._copy_lm_head(base)
        size = self.config.hidden_size
        copy_norm(self.norm, final_norm(base))
        layers = decoder_layers(base)
        if layers is not None and copy_layer(self.blocks[0], layers[-1], slice(size, None)):  # type: ignore[arg-type]
            copy_norm(self.hidden_norm, getattr(layers[-1], "input_layernorm", None))
            with torch.no_grad():
                self.fc.weight[:, -size:].copy_(torch.eye(size))

    @property
    def target_ids(self) -> Tensor | None:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1), hidden

    def draft_logits(self, hidden: Tensor, lm_head: Any = None) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        steps = min(config.steps, batch.tokens.shape[1] - 2)
        outputs = self.unroll(batch, steps)
        ids = self.target_ids
        best = batch.logits.argmax(-1)  # (B, T) the base's own token
        if ids is None:
            wanted = best
        else:
            place = torch.full((len(self.t2d),), -1, device=best.device)
            place[ids] = torch.arange(len(ids), device=best.device)
            wanted = place[best]  # as draft ids, −1 outside the draft vocabulary
        total = torch.zeros((), device=best.device)
        terms: dict[str, Tensor] = {}
        for s, out in enumerate(outputs):
            mask = batch.scored(2 + s)
            span = mask.shape[1]
            mask = mask & (wanted[:, s + 1 : s + 1 + span] >= 0)
            teacher = batch.logits[:, s + 1 : s + 1 + span][mask]
            teacher = teacher if ids is None else teacher[:, ids]
            term = soft_cross_entropy(self.draft_logits(out[:, :span][mask]), teacher) / batch.denominator
            total = total + config.step_decay**s * term
            terms[f"ce_{s + 1}"] = term.detach()
        if steps == config.steps:
            terms["ranks"] = self.unrolled_ranks(batch, outputs, wanted)
        return total, terms
