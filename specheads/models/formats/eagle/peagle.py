"""P-EAGLE in foreign formats: EAGLE-3 whose depths after the first read a mask token and a trained vector.

vLLM 0.33 takes the token from ptd_token_id or pard_token; speculators and NeMo Automodel write mask_token_id, and
SpecForge none. The vector, mask_hidden (1, 1, F), stands for the tapped features. arXiv:2602.01469.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specheads.heads import Eagle3Config
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import flag, whole

CLASS, MASK, TOKENS = "PEagleDraftModel", "mask_hidden", ("ptd_token_id", "pard_token", "mask_token_id")
_OURS = f"{MASK}.weight"


def read_token(files: Files, config: dict[str, Any]) -> int | None:
    """The token that P-EAGLE's depths after the first read, by vLLM's keys or its trainers'; None: it is EAGLE-3."""
    tokens = {name: whole(config, name, least=0) for name in TOKENS if config.get(name) is not None}
    parallel = flag(config, "parallel_drafting", bool(tokens))
    if not tokens and (parallel or MASK in files.shapes):
        raise CheckpointError(
            f"{files}: it is a P-EAGLE head, and its config does not say which token its depths after the first read; "
            'write the one it was trained with into config.json, as "mask_token_id"'
        )
    if len({*tokens.values()}) > 1 or (tokens and not parallel):
        said = {**tokens, "parallel_drafting": parallel}
        raise CheckpointError(f"{files}: its config says {said}; take away what is wrong, the mask token or the flag")
    return next(iter(tokens.values()), None)


def refusal_reason(head: Eagle3Config, masked: bool) -> str | None:
    """Why a form for P-EAGLE's heads (masked), or for EAGLE-3's, does not hold this one; None if it does."""
    if masked:
        return None if head.mask_token_id is not None else "it has no mask_token_id"
    return None if head.mask_token_id is None else "its depths after the first read a mask (mask_token_id)"


def read_mask(files: Files) -> dict[str, Tensor]:
    """The vector by our name. CheckpointError if there is none."""
    if MASK not in files.shapes:
        raise CheckpointError(f"{files}: its config has the mask token of a P-EAGLE head, and it has no {MASK}")
    return {_OURS: files.tensor(MASK).reshape(1, -1)}


def mask_tensor(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The vector by their name, of a head's tensors by ours; {} if the head has none."""
    return {MASK: tensors[_OURS].view(1, 1, -1)} if _OURS in tensors else {}
