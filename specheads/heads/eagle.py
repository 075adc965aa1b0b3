"""EAGLE-1 and EAGLE-2: one decoder block predicts the target's next feature, and the base's lm_head gives its logits.

EAGLE-1, arXiv:2401.15077. EAGLE-2, arXiv:2406.16858, is the same head with a dynamic tree, planner.DynamicTree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specheads.decoding.verify.hf_base import refuse_more_than_lm_head
from specheads.heads.base import TapBatch
from specheads.heads.sampling import split_keys, uniform
from specheads.heads.unrolled import FeatureConfig, FeatureHead
from specheads.losses.functions import feature_distance


@dataclass(frozen=True)
class EagleConfig(FeatureConfig):
    """feature_weight, token_loss_weight: of the two losses. noise: half-width of the uniform feature noise. fc_bias:
    does the fusing layer have a bias? steps: 1 as published, more as in HASS (arXiv:2408.15766). metric_steps: steps
    unrolled in evaluation, for the accepted length of a chain."""

    kind: ClassVar[str] = "eagle"
    title: ClassVar[str] = "EAGLE"
    loss_terms: ClassVar[tuple[str, ...]] = ("feature", "token_loss")

    feature_weight: float = 1.0
    token_loss_weight: float = 0.1
    noise: float = 0.1
    fc_bias: bool = False
    metric_steps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.taps is not None and len(self.taps) != 1:
            raise ValueError(f"an eagle head reads one layer, not taps={self.taps}")


class EagleHead(FeatureHead):
    Config = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        assert config.hidden_size is not None
        super().__init__(config, input_size=config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)

    @property
    def scored_depths(self) -> int:
        return max(self.config.steps, self.config.metric_steps)

    def refuse_unfit(self, base: Any) -> None:
        refuse_more_than_lm_head(base, self.config.kind)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, hidden], -1))
        return x, x

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        noisy = self.training and config.noise > 0
        features = with_noise(batch.features, batch.keys(), config.noise) if noisy else batch.features
        # Evaluation unrolls further than training, for the accepted length of a chain.
        steps = config.steps if self.training else self.scored_depths
        targets, rows = self.drafts(batch, steps, features)
        scores = self.score(batch, targets, rows, (1.0,) * config.steps + (0.0,) * (steps - config.steps))
        # Detached: a base that is being trained too must not move its features towards the drafts.
        true_features = batch.features.detach().flatten(0, 1)[targets.positions]
        distances = []
        for s, predicted in enumerate(rows[: config.steps]):
            indices = targets.indices_of(s)
            distances.append((feature_distance(predicted, true_features[indices]) * targets.weights[indices, s]).sum())
        distance, token_loss = torch.stack(distances).sum() / batch.denominator, scores.total / batch.denominator
        total = config.feature_weight * distance + config.token_loss_weight * token_loss
        terms = {"feature": distance.detach(), "token_loss": token_loss.detach()}
        return total, {**terms, **scores.terms(batch.denominator)}


def with_noise(features: Tensor, keys: Tensor, width: float) -> Tensor:
    """features (B, T, F) + U(−width, width), drawn by keys (B, T)."""
    noise = [uniform(row).mul_(2 * width).sub_(width) for row in split_keys(keys, features.shape[2])]
    return features + torch.stack(noise).to(features.dtype)
