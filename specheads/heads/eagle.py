"""EAGLE-1 and EAGLE-2: extrapolate the target's last feature with one decoder block; the base's own lm_head
turns it into a law. arXiv:2401.15077, arXiv:2406.16858 (the dynamic tree, which is planner.DynamicTree)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specheads.heads.base import TapBatch
from specheads.heads.block import copy_layer, decoder_layers
from specheads.heads.feature import FeatureHead, FeatureHeadConfig
from specheads.losses import add_uniform_noise, feature_distance, soft_cross_entropy


@dataclass(frozen=True)
class EagleConfig(FeatureHeadConfig):
    """feature_weight and law_weight: of the two losses; noise: half-width of the uniform feature noise; fc_bias: of
    the fusing layer; steps: drafted steps that training unrolls, 1 as published, more as in HASS (arXiv:2408.15766);
    metric_steps: those that evaluation unrolls for the joint accepted length."""

    kind: ClassVar[str] = "eagle"

    feature_weight: float = 1.0
    law_weight: float = 0.1
    noise: float = 0.1
    fc_bias: bool = False
    steps: int = 1
    metric_steps: int = 4
    draft_depth: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "feature_weight", "law_weight", "noise")
        self._at_least(1, "steps", "metric_steps")
        if self.taps is not None and len(self.taps) != 1:
            raise ValueError(f"an eagle head reads one layer, not taps={self.taps}")

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        return (num_layers,)


class EagleHead(FeatureHead):
    Config = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        assert config.hidden_size is not None
        super().__init__(config, input_size=config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)

    def initialise(self, base: Any) -> None:
        """The block from the base's last layer, and fc passing the feature through."""
        assert self.config.hidden_size is not None
        layers = decoder_layers(base)
        if layers is not None and copy_layer(self.blocks[0], layers[-1], slice(None)):  # type: ignore[arg-type]
            size = self.config.hidden_size
            with torch.no_grad():
                self.fc.weight[:, size:].copy_(torch.eye(size))

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, hidden], -1))
        return x, x

    def draft_logits(self, hidden: Tensor, lm_head: Any) -> Tensor:
        return lm_head(hidden)

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        features = add_uniform_noise(batch.features, config.noise) if self.training else batch.features
        # Evaluation unrolls as far as the accepted length of a chain wants to know.
        steps = config.steps if self.training else max(config.steps, config.metric_steps)
        outputs = self.unroll(batch, steps, features)
        distance = law = torch.zeros((), device=batch.features.device)
        for s, out in enumerate(outputs[: config.steps]):
            mask = batch.scored(2 + s)
            here, ahead = slice(0, mask.shape[1]), slice(1 + s, 1 + s + mask.shape[1])
            predicted = out[:, here][mask]
            distance = distance + feature_distance(predicted, batch.features[:, ahead][mask])
            law = law + soft_cross_entropy(self.draft_logits(predicted, batch.lm_head), batch.logits[:, ahead][mask])
        distance, law = distance / batch.denominator, law / batch.denominator
        total = config.feature_weight * distance + config.law_weight * law
        terms = {"feature": distance.detach(), "law": law.detach()}
        terms["ranks"] = self.unrolled_ranks(batch, outputs, batch.logits.argmax(-1))
        return total, terms
