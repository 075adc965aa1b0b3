"""Heads that start at random are sure of nothing: their logits start with a standard deviation of at most 1."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from specheads import convert
from specheads.heads.layers.block import final_norm

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip


def spread(norm: torch.nn.Module, lm_head: torch.nn.Linear) -> float:
    """Standard deviation of the logits of 2,000 random directions."""
    directions = torch.randn(2000, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(lm_head(norm(directions)).std())


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), Gemma2Config(**SIZES)], ids=["plain scale", "scale minus one"]
)
@pytest.mark.parametrize("kind", ["eagle3", "parallel", "mtp"])
def test_random_outputs_start_with_logits_of_a_deviation_of_at_most_one(config, kind):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    for factor, expected in ((1.0, None), (40.0, 1.0)):
        with torch.no_grad():
            base.lm_head.weight.mul_(factor)
        head = convert(base, kind, dtype=torch.float32).head
        norm = head.mtp[0].norm if kind == "mtp" else head.norm
        before = spread(final_norm(base), base.lm_head)
        assert spread(norm, base.lm_head) == pytest.approx(expected or before, rel=0.05), factor
        assert before < 1 if expected is None else before > 2, "the case shows nothing"
