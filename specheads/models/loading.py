"""Which Auto class loads a language model: the one place that knows decoder-only models from encoder-decoders."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

# Options of from_pretrained() that say where a model is.
_PLACES = (
    "revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies", "trust_remote_code",
)  # fmt: skip


def load_language_model(name: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """A decoder-only model or an encoder-decoder, by its config, from a folder or hub id.

    options: of from_pretrained(). ValueError, in one line, for a model of another kind; OSError where there is none.
    """
    try:
        config = AutoConfig.from_pretrained(name, **{key: options[key] for key in _PLACES if key in options})
    except OSError:  # an adapter's folder has no config, and is loaded beside its base
        return AutoModelForCausalLM.from_pretrained(name, **options)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in auto._model_mapping and not getattr(config, "auto_map", None):
        raise ValueError(
            f"{name} holds a {config.model_type} model, which does not write text from text: expected a decoder-only "
            "language model or a text-to-text encoder-decoder"
        )
    return auto.from_pretrained(name, **options)
