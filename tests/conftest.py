"""Fixtures: a tiny random base model, so that the claims are about the code and not about a checkpoint."""

import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from specheads import convert

# They assert too, and pytest rewrites the asserts of test files alone.
pytest.register_assert_rewrite("tests.reference", "tests.support")


def pytest_collection_modifyitems(items):
    """Of a grid marked sampled(n), all but every n-th case are slow."""
    seen = {}
    for item in items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            name = item.nodeid.partition("[")[0]
            seen[name] = number = seen.get(name, -1) + 1
            if number % marker.args[0]:
                item.add_marker(pytest.mark.slow)


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


@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    """A folder as checkpoints/ is: a tiny random base with a byte tokenizer, and two heads for it."""
    from tests.support.program import ship

    return ship(tmp_path_factory.mktemp("shipped"))


def with_adapter():
    """A peft model whose adapter changes the law (a fresh LoRA has B = 0 and does not)."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    return adapted.eval()


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    """A base on disk, whose name its heads record."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def named(base_dir):
    """The base of base_dir, which knows its name."""
    return AutoModelForCausalLM.from_pretrained(base_dir)


@pytest.fixture(scope="module")
def model(base):
    """The base with an EAGLE-3 head as it starts out."""
    torch.manual_seed(0)
    return convert(base, "eagle3")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def cache_in_tmp(monkeypatch, tmp_path):
    """Where datasets keeps what it has read."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hf_log(caplog):
    """What the library logs through transformers' logger, which keeps it from the root logger."""
    level = hf_logging.get_verbosity()  # commands of other tests set it
    hf_logging.set_verbosity_warning()
    hf_logging.enable_propagation()
    logging.getLogger("specheads").propagate = True
    yield caplog
    hf_logging.disable_propagation()
    hf_logging.set_verbosity(level)
