"""A decoder block with multi-head latent attention (MLA), as DeepSeek-V2's and Kimi's layers: arXiv:2405.04434.

Keys and values are made from one narrow vector a position, by weights named as there. What a cache keeps of a position
is each head's key and value, not that vector. Shapes: B batch rows, T positions, d size of a query or key: its rotated
part r and the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.heads.layers.block import DecoderBlock, RMSNorm
from specheads.heads.layers.rope import rotate


@dataclass(frozen=True)
class LatentSizes:
    """queries: the width of the vector that queries are made from, None without one; keys: of that for keys and values;
    rotated: r; values: of a head's value, at most d."""

    queries: int | None
    keys: int
    rotated: int
    values: int


class LatentBlock(DecoderBlock):
    """As DecoderBlock. Each head has a key and a value of its own; a position's rotated part of the key is the same in
    all of them."""

    def __init__(self, *, latent: LatentSizes, rope: Mapping[str, Any], **sizes: Any) -> None:
        self.latent = latent
        super().__init__(**sizes)
        self.sharpness = attention_sharpness(rope)

    def add_attention(self, input_size: int, hidden_size: int, bias: bool, eps: float) -> None:
        sizes, d = self.latent, self.head_dim
        if sizes.queries is None:
            self.q_proj = nn.Linear(input_size, self.num_heads * d, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, sizes.queries, bias=False)
            self.q_a_layernorm = RMSNorm(sizes.queries, eps=eps)
            self.q_b_proj = nn.Linear(sizes.queries, self.num_heads * d, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, sizes.keys + sizes.rotated, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.keys, eps=eps)
        self.kv_b_proj = nn.Linear(sizes.keys, self.num_heads * (d - sizes.rotated + sizes.values), bias=False)
        self.o_proj = nn.Linear(self.num_heads * sizes.values, hidden_size, bias=False)

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        sizes = self.latent
        q = self.q_proj(x) if sizes.queries is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
        plain, turned = q.split([self.head_dim - sizes.rotated, sizes.rotated], -1)
        return torch.cat([rotate(by_halves(turned), *rotary), plain], -1) * self.sharpness

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Values are padded with zeros to the size of keys, as caches and attention have one size for both."""
        sizes, d = self.latent, self.head_dim
        narrow, turned = self.kv_a_proj_with_mqa(x).split([sizes.keys, sizes.rotated], -1)
        wide = self.kv_b_proj(self.kv_a_layernorm(narrow))
        plain, v = wide.unflatten(2, (self.num_heads, -1)).transpose(1, 2).split([d - sizes.rotated, sizes.values], -1)
        turned = rotate(by_halves(turned).unsqueeze(1), *rotary).expand(-1, self.num_heads, -1, -1)
        return torch.cat([turned, plain], -1), F.pad(v, (0, d - sizes.values))

    def merge(self, attended: Tensor) -> Tensor:
        return super().merge(attended[..., : self.latent.values])


def by_halves(x: Tensor) -> Tensor:
    """Values (…, r) whose neighbours are turned together, in the order that `rotate` takes: partners r / 2 apart."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def attention_sharpness(rope: Mapping[str, Any]) -> float:
    """What DeepSeek's YaRN multiplies attention scores by, beside 1 / √d."""
    if rope["rope_type"] != "yarn" or not rope.get("mscale_all_dim"):
        return 1.0
    return float((0.1 * rope["mscale_all_dim"] * math.log(max(1.0, rope["factor"])) + 1.0) ** 2)
