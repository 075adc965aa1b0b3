"""Tiny random encoder-decoders whose greedy text varies, and a chain drafter that knows the text it drafts for."""

import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from specheads import DraftTree, chain
from tests.support.prompts import padded

V, PAD, EOS, START = 97, 0, 1, 2
SOURCES = ([27, 42, 22, 85, 13, 36, 1], [44, 1], [5, 5, 81, 62, 30, 7, 12, 90, 17, 1])
BATCHES = {"one": padded(SOURCES[:1], "right"), "ragged": padded(SOURCES, "right")}
IDS = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": START, "bos_token_id": 3}


def restless(model, **std):
    """Weights large enough that text does not repeat one token; std by a part of a parameter's name."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            own = [value for part, value in std.items() if part in name]
            nn.init.normal_(parameter, std=own[0] if own else 0.4)
    return model.eval()


def tiny_t5(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    near = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    model = T5ForConditionalGeneration(T5Config(**{**sizes, **near, **IDS, "tie_word_embeddings": False, **options}))
    return restless(model, relative_attention_bias=1.5)


LAYERS = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in
          (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))}  # fmt: skip


def tiny_bart(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": V, "d_model": 32, "max_position_embeddings": 64, "forced_eos_token_id": None, **LAYERS}
    model = BartForConditionalGeneration(BartConfig(**{**sizes, **IDS, "tie_word_embeddings": False, **options}))
    loud = dict.fromkeys(("shared", "embed", "q_proj", "k_proj"), 1.0)
    return restless(model, **loud, v_proj=0.2, fc=0.2)


def tiny_marian(*, decoder_vocab_size):
    """Whose encoder and decoder have vocabularies of their own."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "d_model": 32, "max_position_embeddings": 64, "forced_eos_token_id": None, **LAYERS}
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    return restless(MarianMTModel(MarianConfig(**sizes, **apart, **IDS, decoder_vocab_size=decoder_vocab_size)))


MODELS = {"t5": tiny_t5, "bart": tiny_bart}


class Known:
    """Drafts chains of `depth` tokens of known decoder texts, wrong at every index divisible by 3 + its row: so rows
    accept different lengths."""

    layers = ()

    def __init__(self, sequences, depth=4):
        self.texts, self.depth = sequences.tolist(), depth

    def default_plan(self, device, do_sample):
        return chain(self.depth)

    def propose(self, context, sampler, plan):
        drafts = []
        for row, (text, history) in enumerate(zip(self.texts, context.history, strict=True)):
            indices = range(len(history), len(history) + self.depth)
            right = [text[i] if i < len(text) else 3 for i in indices]
            wrong = [3 + (token + 1) % 90 for token in right]
            drafts.append([w if p % (3 + row) == 0 else r for p, r, w in zip(indices, right, wrong, strict=True)])
        return DraftTree.chains(context.root, drafts)
