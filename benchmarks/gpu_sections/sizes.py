"""How large the models of benchmarks/gpu.py are, and how much of each section is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig


@dataclass(frozen=True)
class Sizes:
    """hidden … vocab_size: of the random base. prompt, new: tokens of a text. prompts, repeats: of the speed section.

    nodes: per pass of the verification section; compiled: those of them that are compiled too. lengths, context_nodes:
    of the context section; context_compiled: its lengths after which eight nodes are compiled too. attention: texts,
    nodes and slots of the attention section. rounds, steps: of
    each timed cell, that many steps in that many turns. draws: sampled texts; drawn: tokens of each. layers_small: of
    the models of the correctness section. backend: of torch.compile.
    """

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype = torch.float32
    prompt: int = 128
    new: int = 96
    prompts: int = 5
    repeats: int = 3
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    compiled: tuple[int, ...] = (1, 8, 64)
    lengths: tuple[int, ...] = (400, 8000, 32000)  # with nodes and steps just under 512, 8,192, 32,768 slots
    context_nodes: tuple[int, ...] = (1, 8, 64)
    context_compiled: tuple[int, ...] = (8000, 32000)
    attention: tuple[tuple[int, int, int], ...] = (
        (1, 1, 8192), (1, 8, 520), (1, 8, 8200), (1, 8, 32_776), (1, 64, 8256), (1, 64, 32_832), (4, 8, 2056),
        (8, 8, 8200), (16, 1, 2048), (16, 8, 520),
    )  # fmt: skip
    rounds: int = 3
    steps: int = 7
    draws: int = 20_000
    drawn: int = 4
    layers_small: int = 4
    backend: str = "inductor"

    @property
    def weights(self) -> int:
        """Parameters of the base, but for its norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + 2 * self.vocab_size * self.hidden

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.inner, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.key_heads, head_dim=self.head_dim,
            vocab_size=self.vocab_size, max_position_embeddings=max(self.lengths) + 1024, bos_token_id=1,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip


SIZES = {
    size.name: size
    for size in (
        Sizes(
            "toy", 32, 48, 1, 4, 2, 8, 64, prompt=16, new=16, prompts=2, repeats=1, nodes=(1, 2, 8, 128), compiled=(8,),
            lengths=(64, 200), context_nodes=(1, 8), context_compiled=(200,), attention=((1, 8, 100), (2, 1, 64)),
            rounds=1, steps=2, draws=1500, layers_small=1, backend="eager",
        ),
        Sizes("cpu", 256, 688, 4, 8, 2, 64, 2048),
        Sizes("1b", 2048, 8192, 16, 32, 8, 64, 128_256, torch.bfloat16),
        Sizes("8b", 4096, 14336, 32, 32, 8, 128, 128_256, torch.bfloat16),
    )
}  # fmt: skip


def largest(device: torch.device) -> Sizes:
    """The largest base whose weights take at most half of the device's memory; `cpu` without an accelerator."""
    if device.type != "cuda":
        return SIZES["cpu"]
    memory = torch.cuda.get_device_properties(device).total_memory
    fit = [size for size in (SIZES["8b"], SIZES["1b"]) if 4 * size.weights <= memory]
    return fit[0] if fit else SIZES["cpu"]
