"""RMSNorm of inputs in another dtype than its scale, as under autocast."""

from __future__ import annotations

from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """torch's, computed in the dtype of the scale: given two dtypes, torch warns and takes a slower path."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)
