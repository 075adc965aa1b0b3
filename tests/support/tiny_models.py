"""Tiny random models: bases, the draft models near them, and models whose text repeats itself."""

import copy

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)


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


def tiny_llava(**options):
    """A random model that reads images too, of a config that no class without them has. options: of its text model."""
    torch.manual_seed(0)
    tower = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
        patch_size=4, projection_dim=8,
    )  # fmt: skip
    text = tiny_llama(**options).config
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=text.vocab_size - 1)
    return LlavaForConditionalGeneration(config).eval()


def with_adapter(**options):
    """A peft model whose adapter changes the distribution (a fresh LoRA has B = 0 and does not). options: the base's
    own."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(tiny_llama(**options), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    return adapted.eval()


VOCAB, PAD = 97, 0


def llama(**options):
    return tiny_llama(num_hidden_layers=3, max_position_embeddings=2048, **options)


def qwen3():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ids, initializer_range=0.4)).eval()


def gpt2(positions=2048):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": positions, "n_embd": 32, "n_layer": 3, "n_head": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ids, initializer_range=0.3)).eval()


def near(base, noise=0.03):
    """A draft model that is often right: the base with its weights disturbed."""
    small, coin = copy.deepcopy(base), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=coin, dtype=parameter.dtype)
    return small


def repetitive_model(name):
    """A model of two layers whose greedy text repeats itself now and then."""
    torch.manual_seed(0)
    if name == "GPT-2":
        config = GPT2Config(
            vocab_size=VOCAB, n_positions=2200, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2, bos_token_id=1,
            eos_token_id=2, pad_token_id=PAD,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval()
    common = {
        "num_hidden_layers": 2, "max_position_embeddings": 2200, "initializer_range": 0.2, "vocab_size": VOCAB,
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**common, head_dim=8)).eval() if name == "Qwen3" else tiny_llama(**common)
