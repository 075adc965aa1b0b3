"""Loads an export into ModelOpt's own EAGLE module, and compares names with its exporter's list.

ModelOpt cannot read its own exports; this is the module that it exports from.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specheads.models.export_checks.by_transformers import llama
from specheads.models.export_checks.comparison import compare_tensors, compare_values
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.parts.layer_ids import KEY, nested_list

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel


def check(folder: Path, model: SpecModel) -> str:
    from modelopt.torch.export.plugins import hf_spec_export
    from modelopt.torch.speculative.plugins.modeling_eagle import EagleModule

    program, files = f"ModelOpt {version('nvidia-modelopt')}", Files(folder)
    known = hf_spec_export.LLAMA_EAGLE_SINGLE_LAYER
    names = {name.rpartition(".")[0] or name for name in files.shapes}
    if wrong := sorted((known["required"] - names) | (names - known["required"] - known["optional"])):
        raise CheckpointError(f"{program} exports no such names as {folder} has, or others: {', '.join(wrong)}")
    options: dict[str, Any] = dict(files.config or {})
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
        f"hidden states {list(model.head.layers)}, {llama(program, folder, config, model.head.config)}"
    )
