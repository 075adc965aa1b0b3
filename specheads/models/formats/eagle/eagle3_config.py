"""Options of an EAGLE-3 config other than sizes, at its top level and in ModelOpt's table eagle_config.

From the code of vLLM 0.32, SGLang 0.5.23 and TensorRT-LLM (main, 00679c66): all three read fc_norm and norm_output at
the top level; only vLLM reads norm_before_residual there. All read norm_before_fc in the table, and all but
TensorRT-LLM also at the top level. Only TensorRT-LLM reads return_hidden_post_norm (norm_output) in the table. The
other options are ModelOpt's.
"""

from __future__ import annotations

from typing import Any

from specheads.models.files import CheckpointError
from specheads.models.formats.config_values import flag, table
from specheads.models.formats.files import Files
from specheads.models.formats.parts.layer_ids import KEY
from specheads.options import shown

TABLE = "eagle_config"
# Flags that move a norm, at the top and in the table → the option of heads here.
NORMS = {
    "norm_before_residual": "norm_before_residual", "norm_before_fc": "norm_before_fc", "fc_norm": "norm_features",
    "norm_output": "norm_output",
}  # fmt: skip
INSIDE = {"norm_before_fc": "norm_before_fc", "return_hidden_post_norm": "norm_output"}
# Other options, and the value that matches heads here. Any other value is refused by name.
_ANYWHERE = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "eh_proj_before_attn": False, "eagle_decoder_type": "llama", "parallel_draft_step": 1,
    "parallel_drafting": False, "embed_requires_grad": False, "use_aux_norm": False,
}  # fmt: skip
_AT_TOP = {**_ANYWHERE, **{name: False for name in INSIDE if name not in NORMS}}
_IN_TABLE = {**_ANYWHERE, **{name: False for name in NORMS if name not in INSIDE}}
# Options that are read elsewhere, or used only with an option that is refused above.
_OTHERS = {KEY, "next_layer_regular", "has_lm_head", "eh_proj_bias", "parallel_draft_heads_num_layers"}


def read_norms(files: Files, config: dict[str, Any], layers: int) -> dict[str, bool]:
    """The head options that place norms. layers: the number of decoder blocks. CheckpointError, with the option and its
    value, if heads here do not support it."""
    inner = table(config, TABLE)
    for name, ours in _AT_TOP.items():
        _refuse_other(files, name, config.get(name), ours)
    for name, ours in _IN_TABLE.items():
        _refuse_other(files, f"{TABLE}.{name}", inner.get(name), ours)
    for name in inner.keys() - _IN_TABLE.keys() - INSIDE.keys() - _OTHERS:
        _refuse_other(files, f"{TABLE}.{name[:80]}", inner[name])
    if layers > 1:  # it has no effect with one block
        _refuse_other(files, f"{TABLE}.next_layer_regular", inner.get("next_layer_regular"), True)
    if flag(inner, "has_lm_head") and "lm_head.weight" not in files.shapes:
        raise CheckpointError(f"{files}: its config says {TABLE}.has_lm_head=true, and it has no lm_head.weight")
    return {ours: _norm(files, config, inner, theirs, ours) for theirs, ours in NORMS.items()}


def table_flags(norms: set[str]) -> dict[str, bool]:
    """Those of `norms` that TensorRT-LLM reads in the table, under the keys used there."""
    return {theirs: True for theirs, ours in INSIDE.items() if ours in norms}


def _norm(files: Files, config: dict[str, Any], inner: dict[str, Any], theirs: str, ours: str) -> bool:
    values = {theirs: flag(config, theirs)} if config.get(theirs) is not None else {}
    for name, option in INSIDE.items():
        if option == ours and inner.get(name) is not None:
            values[f"{TABLE}.{name}"] = flag(inner, name)
    if len(set(values.values())) > 1:
        both = " and ".join(f"{name}={str(value).lower()}" for name, value in values.items())
        raise CheckpointError(f"{files}: its config says {both}; its readers would disagree")
    return any(values.values())


def _refuse_other(files: Files, name: str, value: object, ours: object = None) -> None:
    """CheckpointError if an option has a value other than `ours`, or any value if `ours` is None."""
    if value is None or (type(value) is type(ours) and value == ours):
        return
    text = str(value).lower() if isinstance(value, bool) else shown(value)
    name = name if name.isprintable() else ascii(name)
    raise CheckpointError(f"{files}: its head has {name}={text}, which is not supported yet")
