"""The parts of the base that are saved with its features, so that training does not need the base.

They are the embeddings of all tokens, the output matrix, and the last layer and norm, which initialise heads.

Shapes: V vocabulary, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from specheads.decoding.kernels.int8_linear import Int8Linear, applied_weight
from specheads.decoding.verify.taps import decoder_layers
from specheads.heads.layers.block import final_norm
from specheads.models.base.loading import auto_class
from specheads.training.features.shards import CHECKSUM, FeatureError, check_contents, write_tensors

FOLDER, WEIGHTS = "base", "kept.safetensors"


@torch.no_grad()
def save_base_parts(base: PreTrainedModel, folder: Path) -> None:
    """Write the base's config and those parts of its weights to folder/base."""
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    base.config.save_pretrained(target)
    write_tensors(target / WEIGHTS, {name: t.detach().cpu().contiguous().clone() for name, t in _kept(base).items()})


@torch.no_grad()
def kept_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """How many bytes `save_base_parts` will write for a base of this config and dtype, from its sizes alone."""
    with torch.device("meta"):
        base = auto_class(config).from_config(config, dtype=dtype)
    return sum(t.numel() * t.element_size() for t in _kept(base).values())


def _kept(base: PreTrainedModel) -> dict[str, Tensor]:
    embed, lm_head = cast(nn.Embedding, base.get_input_embeddings()), cast(nn.Linear, base.get_output_embeddings())
    layers, norm = decoder_layers(base), final_norm(base)
    ids = torch.arange(len(embed.weight), device=embed.weight.device)
    # The module's outputs, not its matrix: some modules scale it (Gemma).
    tensors = {"embed": torch.cat([embed(part) for part in ids.split(4096)])}
    output = applied_weight(lm_head).to(embed.weight.dtype)
    if not _same(output, tensors["embed"], embed):
        tensors["lm_head.weight"] = output
    if getattr(lm_head, "bias", None) is not None:
        tensors["lm_head.bias"] = lm_head.bias
    if layers is not None:  # 3-D weights are experts, which do not initialise a head
        tensors |= {f"layer.{name}": p for name, p in layers[-1].named_parameters() if p.ndim <= 2}
        tensors |= {
            f"layer.{name}.weight": applied_weight(module).to(embed.weight.dtype)
            for name, module in layers[-1].named_modules()
            if isinstance(module, Int8Linear)
        }
    if norm is not None:
        tensors |= {f"norm.{name}": p for name, p in norm.named_parameters()}
    return tensors


def _same(matrix: Tensor, embedded: Tensor, embed: nn.Embedding) -> bool:
    if matrix.is_meta:  # values cannot be compared; subclasses of Embedding scale their output
        return matrix is embed.weight and type(embed) is nn.Embedding
    return matrix.shape == embedded.shape and torch.equal(matrix, embedded)


def _read(folder: Path) -> dict[str, Tensor]:
    path = folder / FOLDER / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            tensors, expected = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        check_contents(path, tensors, (expected or {}).get(CHECKSUM))
        return {"lm_head.weight": tensors["embed"], **tensors}
    except FileNotFoundError as error:
        raise FeatureError(f"{path} is missing: {folder} is no folder of saved features, or one cut short") from error
    except (SafetensorError, OSError, KeyError) as error:
        raise FeatureError(f"{path} is damaged ({error}); copy it again, or save the features again") from error


def _linear(tensors: dict[str, Tensor]) -> nn.Linear:
    weight, bias = tensors["lm_head.weight"], tensors.get("lm_head.bias")
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias}, assign=True)
    return linear


class KeptBase(nn.Module):
    """Stands in for the base in training from saved features: only its config, embeddings (V, H) and output matrix."""

    _no_split_modules = None

    def __init__(self, folder: Path, name: str | None) -> None:
        super().__init__()
        tensors = _read(folder)
        self.config = _config(folder)
        self.name_or_path, self.generation_config = name, GenerationConfig()
        self.embed_tokens, self.lm_head = nn.Embedding.from_pretrained(tensors["embed"]), _linear(tensors)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"the base {self.name_or_path} is not in memory in training from saved features; save the head and load it "
            "with SpecModel.from_pretrained(...) to decode"
        )


def _config(folder: Path) -> PreTrainedConfig:
    """The base's config. No kernel is loaded by a name in it."""
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder / FOLDER)
    config._attn_implementation = config._experts_implementation = None
    return config


def skeleton(folder: Path) -> PreTrainedModel:
    """The base with only the weights that initialise a head, the last layer's among them. It cannot run."""
    tensors, config = _read(folder), _config(folder)
    with torch.device("meta"):
        base: PreTrainedModel = auto_class(config).from_config(config)
    base.set_input_embeddings(nn.Embedding.from_pretrained(tensors["embed"]))
    base.set_output_embeddings(_linear(tensors))
    layers = decoder_layers(base)
    for prefix, module in (("layer.", None if layers is None else layers[-1]), ("norm.", final_norm(base))):
        weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if module is not None and weights:
            module.load_state_dict(weights, strict=False, assign=True)
    return base
