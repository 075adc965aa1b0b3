"""What the config of an EAGLE-3 head may ask for beyond sizes, at its top and in ModelOpt's table eagle_config.

Read in vLLM 0.32, SGLang 0.5.23 and TensorRT-LLM (main, 00679c66): all three look for fc_norm and norm_output at the
top, vLLM alone for norm_before_residual. norm_before_fc is looked for in the table and, but by TensorRT-LLM, at the
top too; return_hidden_post_norm, which is norm_output, in the table by TensorRT-LLM alone. The rest is ModelOpt's own.
"""

from __future__ import annotations

from typing import Any

from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files, flag, shown, table
from specheads.models.formats.parts.layer_ids import KEY

TABLE = "eagle_config"
# Flags at the top that move a norm, those in the table, and the options of heads here that do.
NORMS = {
    "norm_before_residual": "norm_before_residual", "norm_before_fc": "norm_before_fc", "fc_norm": "norm_features",
    "norm_output": "norm_output",
}  # fmt: skip
INSIDE = {"norm_before_fc": "norm_before_fc", "return_hidden_post_norm": "norm_output"}
# What else there is, and what heads here do. Another value is refused by its name.
_ANYWHERE = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "eh_proj_before_attn": False, "eagle_decoder_type": "llama", "parallel_draft_step": 1,
    "parallel_drafting": False, "embed_requires_grad": False, "use_aux_norm": False,
}  # fmt: skip
_AT_TOP = {**_ANYWHERE, **{name: False for name in INSIDE if name not in NORMS}}
_IN_TABLE = {**_ANYWHERE, **{name: False for name in NORMS if name not in INSIDE}}
# Read elsewhere, or only with an option that is refused above.
_OTHERS = {KEY, "next_layer_regular", "has_lm_head", "eh_proj_bias", "parallel_draft_heads_num_layers"}


def read_norms(files: Files, config: dict[str, Any], layers: int) -> dict[str, bool]:
    """The options of heads here that say where norms are; layers: decoder blocks. CheckpointError, by its name and
    value, for an option of the config that heads here do not have."""
    inner = table(config, TABLE)
    for name, ours in _AT_TOP.items():
        _refuse_other(files, name, config.get(name), ours)
    for name, ours in _IN_TABLE.items():
        _refuse_other(files, f"{TABLE}.{name}", inner.get(name), ours)
    for name in inner.keys() - _IN_TABLE.keys() - INSIDE.keys() - _OTHERS:
        _refuse_other(files, f"{TABLE}.{name[:80]}", inner[name])
    if layers > 1:  # of one block it says nothing
        _refuse_other(files, f"{TABLE}.next_layer_regular", inner.get("next_layer_regular"), True)
    if flag(inner, "has_lm_head") and "lm_head.weight" not in files.shapes:
        raise CheckpointError(f"{files}: its config says {TABLE}.has_lm_head=true, and it has no lm_head.weight")
    return {ours: _norm(files, config, inner, theirs, ours) for theirs, ours in NORMS.items()}


def table_flags(norms: set[str]) -> dict[str, bool]:
    """The options of heads here as TensorRT-LLM looks for them in the table; those at the top are not among them."""
    return {theirs: True for theirs, ours in INSIDE.items() if ours in norms}


def _norm(files: Files, config: dict[str, Any], inner: dict[str, Any], theirs: str, ours: str) -> bool:
    said = {theirs: flag(config, theirs)} if config.get(theirs) is not None else {}
    for name, option in INSIDE.items():
        if option == ours and inner.get(name) is not None:
            said[f"{TABLE}.{name}"] = flag(inner, name)
    if len(set(said.values())) > 1:
        told = " and ".join(f"{name}={str(value).lower()}" for name, value in said.items())
        raise CheckpointError(f"{files}: its config says {told}; its readers would disagree")
    return any(said.values())


def _refuse_other(files: Files, name: str, value: object, ours: object = None) -> None:
    """CheckpointError unless a config leaves an option out or has it as heads here do; None: in no way at all."""
    if value is None or (type(value) is type(ours) and value == ours):
        return
    told = str(value).lower() if isinstance(value, bool) else shown(value)
    raise CheckpointError(f"{files}: its head has {name}={told}, which is not read yet")
