"""FSDP2's checkpoints as heads need them: without the frozen base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import fsdp_utils


@contextmanager
def trained_weights_only(accelerator: Any) -> Iterator[None]:
    """Within it, accelerate (1.15) writes and reads trained weights alone, as it otherwise does only for peft models.

    Under FSDP2 with whole state dicts, as in recipes/accelerate/.
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
