"""Compares what a program holds after loading an export with what was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.heads.layers.rope import frequencies
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files


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


def _same(theirs: Tensor, own: Tensor) -> bool:
    return theirs.shape == own.shape and torch.equal(theirs.detach().cpu(), own.to(theirs.dtype))


def compare_values(program: str, folder: Path, theirs: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """CheckpointError that names the config values which the program reads differently."""
    wrong = [f"{n} as {theirs.get(n)!r}, not {value!r}" for n, value in own.items() if theirs.get(n) != value]
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
