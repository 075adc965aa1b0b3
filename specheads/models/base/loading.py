"""Loading a language model and its tokenizer by name: which Auto class, in which dtype, on which device.

A base can be quantised: to 4 or 8 bits with bitsandbytes, as in QLoRA (arXiv:2305.14314), or to int8 weights for a CPU.
Checkpoints of its heads record how; heads and adapters stay in floating point.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import is_bitsandbytes_available
from transformers.utils import logging as hf_logging

from specheads.decoding.probs.precision import bfloat16_is_fast
from specheads.hub import record_commit
from specheads.models.base.int8 import METHOD, Int8Config
from specheads.models.config import SpecConfig
from specheads.options import OptionError, reason, shown

_log = logging.getLogger(__name__)
QUANTIZE = ("4bit", "8bit", "int8")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LARGE = (
    10**8
)  # a smaller base is quick in float32 too, in which its drafted text is token for token that without drafts
# Options of from_pretrained() that locate a model.
_LOCATION = (
    "revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies", "trust_remote_code",
)  # fmt: skip


def load_language_model(
    name: str | os.PathLike[str], *, class_name: str | None = None, quantize: str | None = None, **options: Any
) -> PreTrainedModel:
    """A decoder-only, image-text or encoder-decoder model, chosen by its config, from a folder or hub id.

    class_name: the model's class, in case its config has one with images and one without. quantize: one of QUANTIZE.
    options: of from_pretrained(). ValueError for a model of another kind or an unknown quantisation, OSError if there
    is no model, ImportError without bitsandbytes.
    """
    location = {key: options[key] for key in _LOCATION if key in options}
    if quantize is not None:
        dtype = as_dtype(options.get("dtype")) or getattr(load_config(name, **location), "dtype", None)
        options["quantization_config"] = quantization(quantize, dtype or torch.float32)
    try:
        config = load_config(name, **location)
    except OSError:  # an adapter's folder has no config; transformers loads its base
        return AutoModelForCausalLM.from_pretrained(name, **options)
    auto = auto_class(config, class_name)
    if type(config) not in auto._model_mapping and not getattr(config, "auto_map", None):
        raise ValueError(
            f"{name} holds a {config.model_type} model; expected a decoder-only language model or a text-to-text "
            "encoder-decoder"
        )
    model = auto.from_pretrained(name, **options)
    location.pop("trust_remote_code", None)
    record_commit(model, **location)
    return model


def auto_class(config: PreTrainedConfig, class_name: str | None = None) -> Any:
    """The Auto class for this config. The one with images only if there is no other, or if class_name asks for it."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    with_images: Any = AutoModelForImageTextToText._model_mapping
    if type(config) in with_images and (
        type(config) not in AutoModelForCausalLM._model_mapping or with_images[type(config)].__name__ == class_name
    ):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_config(name: str | os.PathLike[str], **options: Any) -> PreTrainedConfig:
    """The config of a language model. options: of from_pretrained(). ValueError for a draft head; OSError if there is
    none."""
    if "subfolder" not in options:
        refuse_without_config(name)
    config: PreTrainedConfig = AutoConfig.from_pretrained(name, **options)
    if isinstance(config, SpecConfig):  # transformers' Auto classes accept it, too
        raise ValueError(
            f"{name} is a draft head, not a language model; give the model that it drafts for here, and a head as "
            "MODEL, --draft or init_from"
        )
    return config


def load_tokenizer(name: str | os.PathLike[str], **options: Any) -> Any:
    """The tokenizer of a model. options: of from_pretrained(). ValueError if it has none, or a damaged one."""
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} has no tokenizer that can be loaded: save one beside the model with tokenizer.save_pretrained() "
            f"({reason(error)})"
        ) from error


def load_processing(name: str | os.PathLike[str], config: PreTrainedConfig, **options: Any) -> Any:
    """The processor of a model that reads images, if it can be loaded, else its tokenizer. options: of
    from_pretrained(). ValueError as `load_tokenizer`."""
    if auto_class(config) is AutoModelForImageTextToText:
        try:
            processor = AutoProcessor.from_pretrained(name, **options)
        except (OSError, ValueError, ImportError, AttributeError, KeyError, TypeError) as error:
            _log.info("%s: rows with images cannot be read, as its processor does not load: %s", name, reason(error))
        else:
            if hasattr(processor, "image_processor"):
                return processor
    return load_tokenizer(name, **options)


def stop_ids(name: str | os.PathLike[str], config: Any, tokenizer: Any, **options: Any) -> set[int]:
    """The tokens at which a model stops: those of its generation config, its config and its tokenizer. options: of
    from_pretrained()."""
    try:
        generation = GenerationConfig.from_pretrained(name, **options).eos_token_id
    except OSError:
        generation = None
    ids: set[int] = set()
    for value in (generation, getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        ids |= {*value} if isinstance(value, list) else set() if value is None else {value}
    return ids


def refuse_without_config(name: str | os.PathLike[str]) -> None:
    """ValueError for a folder that holds neither a model's config nor an adapter's."""
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        shown_name = name or "'', an empty name,"  # from an unset shell variable
        raise ValueError(f"{shown_name} holds no config.json: give a folder that save_pretrained() wrote, or a hub id")


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype, given as such or by name; None for None and "auto". ValueError for anything else."""
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype in (None, "auto"):
        return None
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating point type; give one such as torch.bfloat16 or 'bfloat16'")
    return parsed


def placement(dtype: str, device: str) -> tuple[torch.dtype | None, torch.device]:
    """--dtype and --device as torch objects; None for "auto" (`settle_dtype`). ValueError if invalid."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is unknown; expected auto, {', '.join(DTYPES)}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} is not usable here: {error}") from error
    hf_logging.disable_progress_bar()
    return DTYPES.get(dtype), chosen


def settle_dtype(base: PreTrainedModel, device: torch.device) -> None:
    """What --dtype auto means for a base as it was loaded, in the dtype of its checkpoint.

    On a CPU it is made float32, unless it is in bfloat16, the processor is fast at that, and it has LARGE weights.
    """
    if device.type != "cpu" or (getattr(base, "is_quantized", False) and not is_int8(base)):
        return
    stays = base.dtype == torch.bfloat16 and bfloat16_is_fast(device) and base.num_parameters() >= LARGE
    if not stays:
        torch.nn.Module.float(base)  # transformers' own refuses all that is quantised


def quantization(quantize: str, dtype: torch.dtype) -> BitsAndBytesConfig | Int8Config:
    """The quantisation config. 4bit: NF4, computed in `dtype`; 8bit: LLM.int8; int8: weights of int8 on a CPU.

    ValueError for other names; ImportError without bitsandbytes, which the first two need."""
    if quantize not in QUANTIZE:
        raise OptionError(f"{{quantize}} is unknown; expected {', '.join(QUANTIZE)}", quantize=quantize)
    if quantize == "int8":
        return Int8Config()
    if not is_bitsandbytes_available():
        raise ImportError(f"quantize={quantize} needs bitsandbytes: pip install bitsandbytes")
    if quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )


def is_int8(base: Any) -> bool:
    """Was this base loaded with int8 weights for a CPU?"""
    return (quantization_of(base) or {}).get("quant_method") == METHOD


def quantization_of(base: Any) -> dict[str, Any] | None:
    """How a base is quantised, from its config; None if it is not."""
    stored = getattr(base.config, "quantization_config", None)
    return stored if stored is None or isinstance(stored, dict) else stored.to_dict()


def quantization_options(recorded: dict[str, Any] | None, name: str, **options: Any) -> dict[str, Any]:
    """Options that load the base `name` quantised as recorded; {} if its own files are already quantised.

    options: of AutoConfig. ValueError if `recorded` is no quantisation config."""
    if recorded is None or getattr(AutoConfig.from_pretrained(name, **options), "quantization_config", None):
        return {}
    try:
        return {"quantization_config": AutoQuantizationConfig.from_dict(recorded)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"base_quantization={shown(recorded)} is not a quantisation ({reason(error)})") from error


def keep_4bit_layout(base: torch.nn.Module) -> None:
    """Let layers of bitsandbytes leave their 4-bit weights as they are. On a CPU with AVX512-BF16 a layer packs them in
    its first pass, and its state_dict() unpacks them with other scales (bitsandbytes 0.50.2). ValueError if it has."""
    layers: Any = base.named_modules()
    for name, layer in layers:
        if not getattr(layer, "support_avx512bf16_for_cpu", False):
            continue
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"{name}: its first pass has packed its 4-bit weights, and saving would change them (a fault of "
                "bitsandbytes on this processor); load the base again, and attach the head before its first pass"
            )
        layer.support_avx512bf16_for_cpu = False
