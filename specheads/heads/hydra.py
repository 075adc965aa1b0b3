"""Hydra: Medusa's heads, each of which also reads the tokens drafted before it. Hydra++ adds a decoder layer, the
prefix layer, before the heads. arXiv:2402.05109.

Head i at position t reads h[t] and the embeddings of x[t+1] … x[t+1+i], and predicts x[t+2+i].
Shapes: B batch rows, T positions, P new positions, H hidden, k nodes of a level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import ChildLogits, Expand, Plan
from specheads.decoding.verify.masks import gather_nodes
from specheads.decoding.verify.taps import decoder_layers
from specheads.heads.base import TapBatch
from specheads.heads.config import DecoderConfig
from specheads.heads.layers.block import (
    Attend,
    DecoderBlock,
    RMSNorm,
    copy_layer,
    copy_norm,
    final_norm,
    read_committed,
)
from specheads.heads.layers.row_attention import RowMask
from specheads.heads.medusa import MedusaConfig, MedusaHead, ResBlock
from specheads.losses.targets import DraftTargets


@dataclass(frozen=True)
class HydraConfig(DecoderConfig, MedusaConfig):
    """prefix_layer: have Hydra++'s decoder layer, with the sizes in the options of DecoderConfig. loss: by default
    against the base's distribution, as Hydra++ is trained; the original Hydra has loss='hard'."""

    kind: ClassVar[str] = "hydra"
    title: ClassVar[str] = "Hydra"
    aliases: ClassVar[dict[str, str]] = {"hydra_num_heads": "num_heads", "hydra_num_layers": "num_layers"}

    loss: str = "ce"
    num_heads: int = 4
    decay: float = 1.0
    prefix_layer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {*vars(DecoderConfig)["__annotations__"]} - {*vars(MedusaConfig)["__annotations__"]}
        if not self.prefix_layer and (sizes := sorted(n for n in own if getattr(self, n) != getattr(HydraConfig, n))):
            raise ValueError(f"hydra head options {sizes} are sizes of the prefix layer: give prefix_layer=true too")

    @property
    def num_blocks(self) -> int:
        return 1  # the prefix layer

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        if not self.prefix_layer:
            return MedusaConfig.base_defaults(self, base_config)
        return super().base_defaults(base_config)


class FusingBlock(nn.Module):
    """Ux + c + SiLU(Wx + b) over n concatenated vectors, (…, n · H) → (…, H); initially W = b = 0."""

    def __init__(self, wide: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, size)
        self.res_connection = nn.Linear(wide, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class PrefixLayer(nn.Module):
    """A decoder block between two norms, over the base's hidden states."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        assert size and eps
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.block = config.block(size)
        self.norm = RMSNorm(size, eps=eps)
        self.rotary = config.rotary()

    def forward(self, attend: Attend, hidden: Tensor, position: Tensor) -> Tensor:
        """hidden (B, T, H) and positions to rotate by → (B, T, H)."""
        return self.norm(attend(self.block, 0, self.input_layernorm(hidden), hidden, self.rotary(position)))

    @torch.no_grad()
    def initialise(self, base: Any) -> None:
        """Copy the base's last layer, but zero its output matrices, so that the initial output is the input, normed to
        the base's mean scale."""
        layers = decoder_layers(base)
        if layers is not None:
            copy_layer(self.block, layers[-1])
        self.block.o_proj.weight.zero_()
        self.block.down_proj.weight.zero_()
        copy_norm(self.norm, final_norm(base))
        self.norm.weight.fill_(self.norm.weight.square().mean().sqrt())


class HydraHead(MedusaHead):
    Config = HydraConfig
    config: HydraConfig

    output_bias = True

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.prefix = PrefixLayer(config) if config.prefix_layer else None

    def make_block(self, depth: int) -> nn.Module:
        size = self.config.hidden_size
        assert size
        rest = (ResBlock(size) for _ in range(1, self.config.num_layers))
        return nn.Sequential(FusingBlock((depth + 2) * size, size), *rest)

    @property
    def attends(self) -> bool:
        return self.prefix is not None

    @torch.no_grad()
    def initialise(self, base: Any) -> None:
        """Each head initially passes h through, as Medusa's do."""
        super().initialise(base)
        for lm_head in self.output_layers():
            lm_head.bias.zero_()
        for fusing in (block[0] for block in self.blocks):  # type: ignore[index]
            size = len(fusing.linear.bias)
            fusing.res_connection.bias.zero_()
            fusing.res_connection.weight.zero_()[:, :size].copy_(torch.eye(size))
        if self.prefix is not None:
            self.prefix.initialise(base)

    def draft_rows(self, batch: TapBatch, targets: DraftTargets) -> list[Tensor]:
        hidden, embedded = batch.features.to(self.dtype), batch.embed(batch.tokens).to(self.dtype)
        if self.prefix is not None:
            (reach,), position = self.config.reaches, batch.position_ids
            mask = RowMask(batch.documents, position, reach)
            self.prefix.rotary.ensure(int(batch.position_ids.max()) + 1, hidden)

            def attend(
                block: DecoderBlock, i: int, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor]
            ) -> Tensor:
                return self.maybe_checkpoint(block.unrolled, x, residual, rotary, mask)[0]

            hidden = self.prefix(attend, hidden, self.prefix.rotary.place(position, batch.base_positions))
        flat = embedded.flatten(0, 1)

        def run_head(i: int) -> Tensor:
            start = targets.starts_of(i)
            inputs = [targets.gather_starts(hidden, i), *(flat[(start + 1 + j) % len(flat)] for j in range(i + 1))]
            return self.blocks[i](torch.cat(inputs, -1))

        return [self.maybe_checkpoint(run_head, i) for i in range(self.config.num_heads)]

    def expander(self, context: Context, plan: Plan) -> Expand:
        target = context.target
        dtype, ids = context.memoize("head", lambda: (self.dtype, self.target_ids))
        hidden = context.features.to(dtype)
        prefix = self.prefix
        if prefix is not None:
            features = hidden
            hidden, _ = read_committed(
                context, plan, features, self.config.reaches, prefix.rotary,
                lambda attend, position: prefix(
                    attend, features, prefix.rotary.place(position, target.base_positions)
                ),
            )  # fmt: skip
        path = context.newest(hidden).unsqueeze(1)  # (B, k, (i + 2) H) at head i: h and each node's tokens so far
        depths = zip(self.blocks, self.lm_heads, strict=True)

        def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            nonlocal path
            block, lm_head = next(depths)
            parent_paths = path if parents is None else gather_nodes(path, parents)
            path = torch.cat([parent_paths, target.embed(tokens).to(dtype)], -1)
            return ChildLogits(lm_head(block(path)), ids)

        return expand
