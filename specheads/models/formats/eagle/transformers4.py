"""A base in the form transformers 4 reads, for the EAGLE repository: config, tokenizer and an index of its weights.

The EAGLE repository finds the embeddings through model.safetensors.index.json, which a base in one file does not have.
Its transformers version (4.53) knows neither rope_parameters nor the tokenizer class TokenizersBackend. The weights
stay where they are: the index has their absolute paths.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from specheads.models.files import CONFIG, WEIGHTS, read_table
from specheads.models.formats.files import INDEX, read_index

FOLDER = "base"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_COPIED = (_TOKENIZER, "generation_config.json", "chat_template.jinja", "special_tokens_map.json")


def rewrite_base(base: PreTrainedModel) -> dict[str, str]:
    """Name of a file in FOLDER → its text; {} if the base is not a local folder of safetensors."""
    name = getattr(base, "name_or_path", None)
    if not name or not (Path(name) / CONFIG).is_file():
        return {}
    source = Path(name)
    config, index = read_table(source / CONFIG), _index(source)
    if config is None or index is None:
        return {}
    texts = {CONFIG: _json(_config(config)), INDEX: _json(index)}
    texts |= {name: (source / name).read_text("utf8") for name in _COPIED if (source / name).is_file()}
    if (source / _TOKENIZER_CONFIG).is_file():
        texts[_TOKENIZER_CONFIG] = _json(_tokenizer(read_table(source / _TOKENIZER_CONFIG, most=None) or {}, source))
    return {f"{FOLDER}/{name}": text for name, text in texts.items()}


def _index(source: Path) -> dict[str, Any] | None:
    """An index with the file of every tensor; None if the base is not stored as safetensors."""
    folder = source.resolve()
    if (source / INDEX).is_file():
        weights, metadata = read_index(source / INDEX)
        return {"metadata": metadata, "weight_map": {name: str(folder / file) for name, file in weights.items()}}
    if not (source / WEIGHTS).is_file():
        return None
    with safe_open(source / WEIGHTS, "pt") as file:
        named = {name: str(folder / WEIGHTS) for name in sorted(file.keys())}
    return {"metadata": {"total_size": (source / WEIGHTS).stat().st_size}, "weight_map": named}


def _config(config: dict[str, Any]) -> dict[str, Any]:
    """The config with rope_theta, rope_scaling and torch_dtype added to rope_parameters and dtype."""
    older = dict(config)
    if "dtype" in config:
        older["torch_dtype"] = config["dtype"]
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        kind = scaling.get("rope_type", "default")
        older["rope_theta"] = rope["rope_theta"]
        older["rope_scaling"] = None if kind == "default" else {"type": kind, **scaling}
    return older


def _tokenizer(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """The tokenizer's config, its class and special tokens under their transformers 4 names."""
    older = {name: value for name, value in config.items() if name not in ("backend", "is_local", "local_files_only")}
    if older.get("tokenizer_class") == "TokenizersBackend":
        older["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    if "chat_template" not in older and (source / "chat_template.jinja").is_file():
        older["chat_template"] = (source / "chat_template.jinja").read_text("utf8")
    return older


def _json(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"
