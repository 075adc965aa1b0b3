"""`specheads export --check`: does what transformers reads of an export equal the head?

Every program that reads a Llama config relies on that. tests/third_party/check_export.py asks the programs themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specheads.heads.layers.rope import SHARE, frequencies, rope_of
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel

_SIZES = (
    "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "rms_norm_eps", "attention_bias", "mlp_bias", "hidden_act", "sliding_window",
)  # fmt: skip


def check(folder: Path, model: SpecModel) -> str:
    """One line on what was compared. CheckpointError if transformers reads a value that differs from the head's."""
    written = Files(folder).config
    if written.get("model_type") != "llama" or SHARE in written:  # transformers' Llama rotates whole heads
        return "not checked: transformers reads no such config; its README has the command that loads it"
    program, config = f"transformers {transformers.__version__}", AutoConfig.from_pretrained(folder)
    assert isinstance(config, LlamaConfig)
    return f"{program} reads its config as the head's: {compare_llama(program, folder, config, model.head.config)}"


def compare_llama(program: str, folder: Path, config: Any, head: Any) -> str:
    """Compare a Llama config in memory with a head, rotary angles included → what was compared, as text."""
    wanted = {**{name: getattr(head, name) for name in _SIZES}, "num_hidden_layers": head.num_layers}
    read = {name: getattr(config, name, None) for name in wanted}
    compare_values(
        program, folder, {**read, "rope_parameters": rope_of(config)},
        {**wanted, "rope_parameters": head.rope_parameters},
    )  # fmt: skip
    positions = positions_below(2 * config.max_position_embeddings)
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = (t[0].chunk(2, -1)[0] for t in rotary(rotary.inv_freq, positions.unsqueeze(0)))
    return f"{len(wanted)} sizes, {compare_rotary(program, head, positions, cos, sin)}"


def compare_tensors(program: str, folder: Path, held: Mapping[str, Tensor], unread: tuple[str, ...] = ()) -> int:
    """Check that the program holds every tensor of the file, with equal values in its dtype → how many.

    held: its tensors by the file's names. unread: names that it does not use. CheckpointError names those that differ.
    """
    files = Files(folder)
    names = [name for name in files.shapes if name not in unread]
    wrong = [name for name in names if name not in held or not _same(held[name], files.tensor(name))]
    if wrong:
        raise CheckpointError(f"{program} did not read {', '.join(sorted(wrong)[:6])} of {folder} as written")
    return len(names)


def _same(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.shape == ours.shape and torch.equal(theirs.detach().cpu(), ours.to(theirs.dtype))


def compare_values(program: str, folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """CheckpointError that names the config values which the program reads differently."""
    wrong = [f"{n} as {theirs.get(n)!r}, not {value!r}" for n, value in ours.items() if theirs.get(n) != value]
    if wrong:
        raise CheckpointError(f"{program} reads of {folder} {'; '.join(wrong)}")


def positions_below(end: int) -> Tensor:
    """(P,) the first 64 positions, and those around each power of two below `end`."""
    around = [1 << i for i in range(6, end.bit_length())]
    return torch.tensor(sorted({*range(min(64, end)), *(p + d for p in around for d in (-1, 0, 1) if p + d < end)}))


def compare_rotary(program: str, head: Any, positions: Tensor, cos: Tensor, sin: Tensor) -> str:
    """Compare the program's cos and sin (P, d / 2) at positions (P,) with the head's, to within the precision of their
    dtype and of float32 angles."""
    angles, factor = frequencies(head.head_dim, head.rope_parameters)
    angle = torch.outer(positions.float(), angles)
    gaps = (torch.stack([cos, sin]).detach().cpu().float() - torch.stack([angle.cos(), angle.sin()]) * factor).abs()
    allowed = positions.unsqueeze(1) * 2.0**-22 + 2 * max(1.0, factor) * torch.finfo(cos.dtype).eps
    if bool((gaps > allowed).any()):
        raise CheckpointError(
            f"{program} rotates positions up to {int(positions[-1])} by other angles than the head does: cos and sin "
            f"are {float(gaps.max()):.1e} apart"
        )
    return f"rotary positions up to {int(positions[-1]):,}"
