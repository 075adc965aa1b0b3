"""Loads an export with the code of the program it was written for, and compares what that holds with the head.

Not a test of the suite: it needs that program, in an environment made as in the first lines of run_vllm.py and others.

    PYTHONPATH=. python tests/third_party/check_export.py HEAD FOLDER ENGINE

ENGINE: vllm, speculators, modelopt or llamacpp (with the package gguf, from llama.cpp's gguf-py, and an export --gguf).
HEAD: the head that was exported into FOLDER. It ends with an error if a value differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specheads import CheckpointError, SpecModel
from specheads.heads.layers.rope import frequencies
from specheads.models.export_checks import (
    check,
    compare_llama,
    compare_rotary,
    compare_tensors,
    compare_values,
    positions_below,
)
from specheads.models.formats.export import gguf_files
from specheads.models.formats.export.gguf_files import DRAFT
from specheads.models.formats.files import Files
from specheads.models.formats.parts.layer_ids import KEY, boundaries, nested_list

# --- speculators ---


def by_speculators(folder: Path, model: SpecModel) -> str:
    from speculators import SpeculatorModel

    program = f"speculators {version('speculators')}"
    loaded = SpeculatorModel.from_pretrained(str(folder), attn_implementation="eager")
    found = (
        f"{program} loads it, with the values of all {compare_tensors(program, folder, loaded.state_dict())} tensors"
    )
    if model.head.config.kind != "eagle3":  # other kinds have Qwen3's block, not Llama's
        return found
    return f"{found}, {compare_llama(program, folder, loaded.config.transformer_layer_config, model.head.config)}"


# --- ModelOpt, whose exports it cannot read itself: this is the module that it exports from ---


def by_modelopt(folder: Path, model: SpecModel) -> str:
    from modelopt.torch.export.plugins import hf_spec_export
    from modelopt.torch.speculative.plugins.modeling_eagle import EagleModule

    program, files = f"ModelOpt {version('nvidia-modelopt')}", Files(folder)
    known = hf_spec_export.LLAMA_EAGLE_SINGLE_LAYER
    names = {name.rpartition(".")[0] or name for name in files.shapes}
    if wrong := sorted((known["required"] - names) | (names - known["required"] - known["optional"])):
        raise CheckpointError(f"{program} exports no such names as {folder} has, or others: {', '.join(wrong)}")
    options: dict[str, Any] = dict(files.config)
    inner = options.pop("eagle_config", None) or {}
    config = LlamaConfig(**{**options, **inner, "has_lm_head": True, "eagle_decoder_type": "llama"})
    read = {"layers, numbered by their outputs,": getattr(config, KEY, None)}
    compare_values(program, folder, read, {name: nested_list(model.head.layers, model.base) for name in read})
    module = EagleModule(config, LlamaDecoderLayer)
    try:
        module.load_state_dict({name: files.tensor(name) for name in files.shapes}, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{program} cannot load {folder}: {error}") from error
    count = compare_tensors(program, folder, module.state_dict())
    return (
        f"{program} fills its EAGLE module with it: the values of all {count} tensors under its exporter's names, "
        f"hidden states {list(model.head.layers)}, {compare_llama(program, folder, config, model.head.config)}"
    )


# --- vLLM ---

_UNREAD = ("t2d", "token_map")  # token_map: vLLM ignores it if a Medusa head has a row per token, as exports do
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def by_vllm(folder: Path, model: SpecModel) -> str:
    base = gguf_files.folder_of(model.config.base_model_name_or_path, model.config.base_revision)
    head = model.head.config
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "held.pt"
        command = [sys.executable, __file__, "in_vllm", folder, base, head.kind, head.served_depth, _dtype(folder), out]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
            raise CheckpointError(f"vLLM cannot load {folder}: {said[-1].strip()}")
        found = torch.load(out, weights_only=True)
    program = f"vLLM {found['version']}"
    count = compare_tensors(program, folder, _by_file(folder, found["tensors"]), _UNREAD)
    compared = [f"the values of all {count} tensors"]
    if found["layers"] is not None:
        compare_values(program, folder, found, {"layers": boundaries(model.head.layers, model.base)})
        compared.append(f"hidden states {found['layers']}")
    if found["cos"] is not None:
        compared.append(compare_rotary(program, head, found["positions"], found["cos"], found["sin"]))
    return f"{program} loads it as {found['class']}, with {', '.join(compared)}"


def _dtype(folder: Path) -> str:
    files = Files(folder)
    return next(str(t.dtype).removeprefix("torch.") for t in files.shapes.values() if t.is_floating_point())


def _by_file(folder: Path, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """vLLM's tensors under the file's names: stacked ones are split, and padding rows of vocabularies dropped."""
    found, shapes = {}, Files(folder).shapes
    for name, shape in shapes.items():
        theirs, start = _location(name, shapes)
        own = next((t for n, t in held.items() if n == theirs or n.endswith(f".{theirs}")), None)
        if own is not None:
            found[name] = own[start : start + len(shape)]
    return found


def _location(name: str, shapes: dict[str, Tensor]) -> tuple[str, int]:
    """The suffix of vLLM's name for a tensor of the file, and the row of vLLM's tensor at which it starts."""
    if name == "d2t":
        return "draft_id_to_target_id", 0
    theirs = name.replace("midlayer.", "layers.0.")
    for whole, parts in _STACKED.items():
        for i, part in enumerate(parts):
            if part in theirs:
                return theirs.replace(part, whole), sum(len(shapes[name.replace(part, other)]) for other in parts[:i])
    return theirs, 0


def in_vllm(folder: str, base: str, method: str, depth: str, dtype: str, out: str) -> None:
    """In a process of its own: load the draft head in `folder` into vLLM, and write its tensors, as vLLM holds them, to
    the file `out`. Of `base` only the config is used."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    speculative = {"method": method, "model": folder, "num_speculative_tokens": int(depth)}
    args = EngineArgs(model=base, dtype=dtype, enforce_eager=True, speculative_config=speculative)
    config = args.create_engine_config()
    draft = config.speculative_config.draft_model_config
    torch.set_default_dtype(draft.dtype)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{out}.rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        model = initialize_model(vllm_config=config, model_config=draft)
        # Not get_model, which may repack matrices for a device, so that their values cannot be compared.
        get_model_loader(config.load_config).load_weights(model, draft)
    rotary = next((m for m in model.modules() if hasattr(m, "cos_sin_cache")), None)
    found: dict[str, Any] = {
        "version": vllm.__version__, "class": type(model).__name__, "cos": None, "positions": None, "sin": None,
        "layers": getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None),
        "tensors": {name: t.detach().cpu().clone() for name, t in model.state_dict().items()},
    }  # fmt: skip
    if rotary is not None:
        cache = rotary.cos_sin_cache.detach().cpu()
        found["positions"] = positions_below(len(cache))
        found["cos"], found["sin"] = (t.clone() for t in cache[found["positions"]].chunk(2, -1))
    torch.save(found, out)


# --- llama.cpp's gguf ---

_ARCHITECTURE = "eagle3"
_PLACES = {"midlayer.": "model.layers.0.", "layers.0.": "model.layers.0.", "norm.": "model.norm."}


def by_gguf(folder: Path, model: SpecModel) -> str:
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


ASKED = {"vllm": by_vllm, "speculators": by_speculators, "modelopt": by_modelopt, "llamacpp": by_gguf}


def main(head: str, folder: str, engine: str) -> None:
    model = SpecModel.from_pretrained(head)
    print(ASKED[engine](Path(folder), model))
    print(check(Path(folder), model))


if __name__ == "__main__":
    in_vllm(*sys.argv[2:]) if sys.argv[1] == "in_vllm" else main(*sys.argv[1:])
