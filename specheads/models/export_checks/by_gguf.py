"""Reads the GGUF file of a head back with llama.cpp's own `gguf` package: metadata, names, and every value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.heads.layers.rope import frequencies
from specheads.models.export_checks.comparison import compare_tensors, compare_values
from specheads.models.files import CheckpointError
from specheads.models.formats.export.gguf_files import DRAFT
from specheads.models.formats.files import Files
from specheads.models.formats.parts.layer_ids import boundaries

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel

_ARCHITECTURE = "eagle3"
_PLACES = {"midlayer.": "model.layers.0.", "layers.0.": "model.layers.0.", "norm.": "model.norm."}


def check(folder: Path, model: SpecModel) -> str:
    import gguf

    if not (folder / DRAFT).is_file():
        return f"not checked: {folder} holds no {DRAFT}; export with --gguf"
    head: Any = model.head.config
    if head.kind != _ARCHITECTURE:
        return f"not checked: the values of {DRAFT} are compared for EAGLE-3 heads alone"
    reader = gguf.GGUFReader(folder / DRAFT)
    fields = {name.removeprefix(f"{_ARCHITECTURE}."): field.contents() for name, field in reader.fields.items()}
    wanted = _wanted(head, boundaries(model.head.layers, model.base))
    compare_values("gguf", folder / DRAFT, _as_floats(fields), _as_floats(wanted))
    files, held = Files(folder), {t.name: _values(gguf, t) for t in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.EAGLE3, 1)
    found: dict[str, Tensor] = {}
    for name in files.shapes:
        theirs = _renamed(name, names)
        if theirs in held:
            turned = {"q_proj": head.num_attention_heads, "k_proj": head.num_key_value_heads}
            heads = next((count for part, count in turned.items() if part in name), None)
            found[name] = held[theirs] if heads is None else _halves(held[theirs], heads)
    if "d2t" in found:  # target ids in GGUF, offsets from draft ids in the export
        found["d2t"] = found["d2t"] - torch.arange(len(found["d2t"]))
    count = compare_tensors("gguf", folder, found, unread=("t2d",))  # the converter leaves it out
    if head.rope_parameters["rope_type"] == "llama3":
        _compare_llama3(folder, head, held.get("rope_freqs.weight"))
    return f"gguf reads {DRAFT}: {len(wanted)} values of its metadata, the values of {count} tensors"


def _compare_llama3(folder: Path, head: Any, divisors: Tensor | None) -> None:
    """GGUF has Llama 3.1's rope scaling not in metadata but in a tensor (d / 2,) that divides the unscaled angles."""
    own = frequencies(head.head_dim, head.rope_parameters)[0]
    plain = frequencies(head.head_dim, {**head.rope_parameters, "rope_type": "default"})[0]
    if divisors is None or divisors.shape != own.shape or not torch.allclose(plain / divisors, own, rtol=1e-5):
        raise CheckpointError(f"gguf reads of {folder / DRAFT} other angles in rope_freqs than llama3's of the head")


def _wanted(head: Any, taps: list[int]) -> dict[str, Any]:
    """The expected metadata, by key without the architecture prefix."""
    rope = head.rope_parameters
    wanted = {
        "general.architecture": _ARCHITECTURE, "target_layers": taps, "embedding_length": head.hidden_size,
        "feed_forward_length": head.intermediate_size, "block_count": 1, "vocab_size": head.vocab_size,
        "attention.head_count": head.num_attention_heads, "attention.head_count_kv": head.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": head.rms_norm_eps, "rope.freq_base": rope["rope_theta"],
        "norm_before_residual": head.norm_before_residual, "norm_before_fc": head.norm_before_fc,
    }  # fmt: skip
    if rope["rope_type"] in ("linear", "yarn"):
        wanted |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        wanted["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return wanted


def _as_floats(values: dict[str, Any]) -> dict[str, Any]:
    """Floats rounded to 32 bits, as GGUF stores them."""
    return {
        name: torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value
        for name, value in values.items()
    }


def _renamed(name: str, names: Any) -> str | None:
    for ours, theirs in _PLACES.items():
        if name.startswith(ours):
            name = name.replace(ours, theirs, 1)
    if name.endswith("hidden_norm.weight"):
        return "blk.0.attn_norm_2.weight"
    if name == "input_norm.weight":
        return "enc.output_norm.weight"
    return names.get_name(name, try_suffixes=(".weight",)) or name


def _values(gguf: Any, tensor: Any) -> Tensor:
    if tensor.tensor_type.name.startswith("I"):
        return torch.from_numpy(tensor.data.copy())
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each attention head in llama.cpp's order (rotated pairs are neighbours) → Llama's order (in halves)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
