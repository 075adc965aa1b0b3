"""FSDP2 checkpoints for heads: without the frozen base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import fsdp_utils


@contextmanager
def trained_weights_only(accelerator: Any) -> Iterator[None]:
    """In the block accelerate (1.15) saves and loads only trained weights, as it otherwise does only for peft models.

    Applies to FSDP2 with full state dicts, as in recipes/accelerate/.
    """
    plugin, asked = getattr(accelerator.state, "fsdp_plugin", None), getattr(fsdp_utils, "is_peft_model", None)
    whole = plugin is not None and plugin.fsdp_version == 2 and plugin.state_dict_type.name == "FULL_STATE_DICT"
    if asked is None or not whole:
        yield
        return
    fsdp_utils.is_peft_model = lambda model: True
    try:
        yield
    finally:
        fsdp_utils.is_peft_model = asked
