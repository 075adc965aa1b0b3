"""Heads learn beside a base that torchao quantised, and drafts are its own greedy text."""

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from specheads import convert
from specheads.models.base.fingerprint import fingerprint_base
from tests.support.tiny_models import tiny_llama

CONFIGS = {"int8 weights": "Int8WeightOnlyConfig", "float8 weights": "Float8WeightOnlyConfig"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_learns_beside_a_base_of_torchaos_and_drafts_its_text(name, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    base = tiny_llama(num_hidden_layers=3, hidden_size=64, intermediate_size=128)
    base.save_pretrained(tmp_path)
    config = TorchAoConfig(getattr(quantization, CONFIGS[name])())
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32).eval()
    assert type(quantised.model.layers[0].self_attn.q_proj.weight).__module__.startswith("torchao.")
    assert fingerprint_base(quantised)["weights"] not in (None, fingerprint_base(base)["weights"])
    ids = torch.tensor([[5, 17, 3, 88, 41, 9]])
    options = {"max_new_tokens": 12, "do_sample": False}
    text = quantised.generate(ids, **options)
    model = convert(quantised, "eagle3").train()
    optimizer, losses = torch.optim.AdamW(model.head.parameters(), lr=1e-3), []
    for _ in range(4):
        loss = model(text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(model.eval().generate(ids, **options), text)
