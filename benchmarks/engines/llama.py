"""llama.cpp for `specheads bench`, through llama-cpp-python: plain, or with llama-cpp-python's prompt lookup.

    specheads bench my/llama --engine benchmarks/engines/llama.py=llama/bin/python -d llama.cpp -d llama.cpp-lookup

The base is written as two files, from which the worker makes a GGUF file: gguf.json, with "metadata", [key, type,
value] each, and "tensors", [name, shape, dtype, offset] each; and the tensors.bin that it names. Weights have the
base's dtype; norms and biases are float32, as llama.cpp requires. Its rotary embedding pairs neighbours where
transformers pairs halves, so the rows of q and k are interleaved.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.bench.compare.decoder_spec import BenchSetup, Cell, Engine, OneRow
from specheads.bench.compare.peer import PeerError, write_once
from specheads.bench.figures.results import digest
from specheads.bench.runner import Decoder
from specheads.models.base.fingerprint import fingerprint_base

NAME = "llama.cpp"
NGRAM = 3  # longest n-gram that its prompt lookup searches for
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # llama.cpp's codes for weight dtypes
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMAL, CONTROL = 1, 3  # llama.cpp's codes for token types


@dataclass(frozen=True)
class LlamaCpp(OneRow):
    """Plain decoding: one token per step."""

    peer: ClassVar[str | None] = NAME
    reason: ClassVar[str] = "llama-cpp-python generates one row at a time"

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        return _decoder(setup, cell)


@dataclass(frozen=True)
class LlamaCppLookup(LlamaCpp):
    """llama-cpp-python's prompt lookup, of at most num_tokens per step."""

    num_tokens: int = 10

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"llama.cpp-lookup:{self.num_tokens} drafts nothing; give at least 1 token")

    def build(self, setup: BenchSetup, cell: Cell) -> Decoder:
        return _decoder(setup, cell, lookup=self.num_tokens, ngram=NGRAM)


def _decoder(setup: BenchSetup, cell: Cell, *, lookup: int = 0, ngram: int = 0) -> Decoder:
    peer, base = setup.peers[NAME], setup.models.target
    path = peer.folder / f"base-{digest(fingerprint_base(base), str(base.dtype))}.gguf"

    def convert(out: Path) -> None:
        source = out.with_name(out.name + "-source")
        shutil.rmtree(source, ignore_errors=True)
        write_source(base, setup.models.tokenizer, source)
        peer.ask("convert", model=str(source), out=str(out))
        shutil.rmtree(source)

    write_once(path, convert)
    loaded: dict[str, Any] = {
        "base": str(path), "num_threads": torch.get_num_threads(), "exact_cache": base.dtype == torch.float32,
        # Room for the longest text and a draft, plus one.
        "num_positions": setup.longest + setup.max_new_tokens + lookup + 1, "lookup": lookup, "ngram": ngram,
    }  # fmt: skip
    return peer.decoder(
        f"lookup {lookup}" if lookup else "plain", loaded, max_new_tokens=setup.max_new_tokens,
        temperature=cell.temperature, ends=setup.ends,
    )  # fmt: skip


ENGINE = Engine(
    NAME, Path(__file__).with_name("llama_worker.py"), {"llama.cpp": LlamaCpp, "llama.cpp-lookup": LlamaCppLookup}
)


def write_source(base: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write both files. PeerError, in one line, unless the base is a plain Llama with a byte-level BPE tokenizer."""
    _require_llama(base)
    placed: list[list[Any]] = []
    header = {"metadata": [*metadata(base), *vocabulary(tokenizer, base.config.vocab_size)], "tensors": placed}
    folder.mkdir(parents=True)
    with open(folder / "tensors.bin", "wb") as file:
        for name, tensor in tensors(base).items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            placed.append([name, list(tensor.shape), dtype, file.tell()])
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    (folder / "gguf.json").write_text(json.dumps(header), "utf8")


def metadata(base: PreTrainedModel) -> list[tuple[str, str, Any]]:
    """(key, type, value) of a Llama's GGUF metadata, except for the vocabulary."""
    config: Any = base.config
    head_dim = _head_dim(config)
    counts = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    return [
        ("general.architecture", "string", "llama"),
        ("general.name", "string", Path(str(base.name_or_path)).name or "llama"),
        ("general.file_type", "uint32", FILE_TYPES[str(base.dtype).removeprefix("torch.")]),
        *((f"llama.{name}", "uint32", value) for name, value in counts.items()),
        ("llama.attention.layer_norm_rms_epsilon", "float32", config.rms_norm_eps),
        ("llama.rope.freq_base", "float32", config.rope_parameters["rope_theta"]),
    ]


def vocabulary(tokenizer: Any, size: int) -> list[tuple[str, str, Any]]:
    """The tokens and merges of a byte-level BPE as GGUF metadata. Ids without a token get made-up names."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    if model.get("type") != "BPE" or not model.get("merges"):
        raise PeerError("llama.cpp: the base's tokenizer is no byte-level BPE, the only kind that is written here")
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    added, ids = tokenizer.added_tokens_decoder, range(size)
    special = {f"tokenizer.ggml.{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
    return [
        ("tokenizer.ggml.model", "string", "gpt2"),
        # The engine is given ids, never text, so how text would be split before BPE does not matter.
        ("tokenizer.ggml.pre", "string", "gpt-2"),
        ("tokenizer.ggml.tokens", "strings", [names.get(index, f"[PAD{index}]") for index in ids]),
        ("tokenizer.ggml.token_type", "int32s", [NORMAL if i in names and i not in added else CONTROL for i in ids]),
        ("tokenizer.ggml.merges", "strings", [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]),
        ("tokenizer.ggml.add_bos_token", "bool", False),
        *((key, "uint32", value) for key, value in special.items() if value is not None),
    ]  # fmt: skip


def tensors(base: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by llama.cpp's names, on the CPU. An output matrix tied to the embeddings is left out."""
    config: Any = base.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in base.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = tensor.detach().cpu()
        count = next((count for part, count in heads.items() if part in name), None)
        tensor = tensor if count is None else interleave(tensor, count)
        found[_renamed(name)] = tensor if tensor.dim() > 1 else tensor.float()
    divisors = rope_divisors(base)
    return found if divisors is None else {**found, "rope_freqs.weight": divisors}


def interleave(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of (heads · d, …): each head's rows, in two halves, become one of each half in turn."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rope_divisors(base: PreTrainedModel) -> Tensor | None:
    """The divisors (d / 2,) of a scaled rotary embedding's angles; None if it is not scaled.

    PeerError if it is more than that: if angles depend on the length, or cos and sin are scaled."""
    config: Any = base.config
    rope: Any = base.get_decoder().rotary_emb
    kind = config.rope_parameters["rope_type"]
    if kind in ("dynamic", "longrope") or rope.attention_scaling != 1:
        raise PeerError(f"llama.cpp: a rotary embedding of type {kind!r} is not written here; only fixed angles are")
    own = rope.inv_freq.detach().float().cpu()
    head_dim = _head_dim(config)
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    divisors = (plain / own.double()).float()
    return None if torch.allclose(divisors, torch.ones_like(divisors), rtol=1e-5) else divisors


def _require_llama(base: PreTrainedModel) -> None:
    config: Any = base.config
    if type(base).__name__ != "LlamaForCausalLM":
        raise PeerError(f"llama.cpp: of bases only LlamaForCausalLM is written as GGUF, not {type(base).__name__}")
    if str(base.dtype).removeprefix("torch.") not in FILE_TYPES:
        raise PeerError(f"llama.cpp: weights of {base.dtype} are not written here; give --dtype float32")
    if config.hidden_act != "silu":
        raise PeerError(f"llama.cpp: its Llama has the activation silu, and the base has {config.hidden_act!r}")


def _renamed(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if found is None or found[2] not in _LAYER:
        raise PeerError(f"llama.cpp: its Llama has no weight for {name!r}")
    return f"blk.{found[1]}.{_LAYER[found[2]]}.{kind}"


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
