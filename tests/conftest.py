"""Fixtures: a tiny random base model, so that the claims are about the code and not about a checkpoint."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(**options):
    """A random Llama, 8 layers × 32, vocabulary 97, float32, on a fixed seed."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    # Weights larger than usual, so that greedy text varies instead of repeating one token.
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "initializer_range": 0.3, **options})).eval()


@pytest.fixture(scope="session")
def base():
    return tiny_llama()
