"""Options of an EAGLE-3 config other than sizes, at its top level and in ModelOpt's table eagle_config.

From the code of vLLM 0.32, SGLang 0.5.23 and TensorRT-LLM (main, 00679c66): all three read fc_norm and norm_output at
the top level; only vLLM reads norm_before_residual there. All read norm_before_fc in the table, and all but
TensorRT-LLM also at the top level. Only TensorRT-LLM reads return_hidden_post_norm (norm_output) in the table. The
other options are ModelOpt's: keys/without_effect.py has their values.
"""

from __future__ import annotations

from typing import Any

from specheads.models.files import CheckpointError
from specheads.models.formats.config_values import flag, table
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import refusal

TABLE = "eagle_config"
# Flags that move a norm, at the top and in the table → the option of heads here.
NORMS = {
    "norm_before_residual": "norm_before_residual", "norm_before_fc": "norm_before_fc", "fc_norm": "norm_features",
    "norm_output": "norm_output",
}  # fmt: skip
INSIDE = {"norm_before_fc": "norm_before_fc", "return_hidden_post_norm": "norm_output"}


def read_norms(files: Files, config: dict[str, Any], layers: int) -> dict[str, bool]:
    """The head options that place norms. layers: the number of decoder blocks. CheckpointError, with the option and its
    value, if heads here do not support it."""
    inner = table(config, TABLE)
    if not flag(inner, "next_layer_regular", True) and layers > 1:  # it has no effect with one block
        raise refusal(files, f"{TABLE}.next_layer_regular", False)
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
