"""Rotary positions of a head: its options, those of its base, and the table of cos and sin.

Options are spelled as transformers 5's `rope_parameters`; frequencies come from transformers' own functions.
Shapes: B batch rows, T positions, d head size, r rotated width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specheads.decoding.verify.model_inputs import BasePositions
from specheads.heads.limits import MAX_POSITIONS
from specheads.options import refuse_unknown, shown

USUAL_THETA = 10_000.0
# Each type's required and optional parameters.
_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
SHARE = "partial_rotary_factor"  # of each head's values that is rotated, the first ones; for every type
LENGTH_DEPENDENT = ("dynamic", "longrope")  # types whose frequencies change with the length of the text
_LEAST = {"factor": 1.0, "original_max_position_embeddings": 1, "rope_theta": 1.0}


def rope_type(parameters: Mapping[str, Any]) -> Any:
    """The type in a config's table, under the current key or the older one."""
    return parameters.get("rope_type", parameters.get("type", "default"))


def rope_options(kind: Any) -> tuple[str, ...]:
    """The options of a rope type beside rope_theta; those of every type for an unknown one."""
    known = [options for name, options in _OPTIONS.items() if name == kind] or _OPTIONS.values()
    return tuple(dict.fromkeys((*(option for needed, possible in known for option in (*needed, *possible)), SHARE)))


def check_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters in a fixed order, numbers as floats, without None. ValueError if a head cannot have them."""
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{shown(parameters)}; expected a table with rope_type, rope_theta and what the type needs")
    given = {name: value for name, value in parameters.items() if value is not None}
    kind = given.pop("rope_type", "default")
    if kind in LENGTH_DEPENDENT:
        raise ValueError(
            f"rope_type={kind!r} has frequencies that change with the length of the text, and the keys in a head's "
            f"cache are not rotated again; known: {', '.join(_OPTIONS)}"
        )
    if not isinstance(kind, str) or kind not in _OPTIONS:
        raise ValueError(f"unknown rope_type={shown(kind)}; known: {', '.join(_OPTIONS)}")
    needed, possible = _OPTIONS[kind]
    names = ("rope_theta", *needed, *possible, SHARE)
    if given.get(SHARE) == 1:
        del given[SHARE]
    refuse_unknown(given, names, what=f"option of rope_type={kind!r}")
    if missing := [name for name in ("rope_theta", *needed) if name not in given]:
        raise ValueError(f"rope_type={kind!r} needs {', '.join(missing)}")
    result = {"rope_type": kind, **{name: _value(name, given[name]) for name in names if name in given}}
    slow, fast = result.get("beta_slow", 1.0), result.get("beta_fast", 32.0)
    if slow > fast:
        raise ValueError(f"beta_slow={slow} must not be above beta_fast={fast}")
    if kind == "llama3" and result["low_freq_factor"] >= result["high_freq_factor"]:
        raise ValueError(
            f"low_freq_factor={result['low_freq_factor']} must be below high_freq_factor={result['high_freq_factor']}"
        )
    return result


def _value(name: str, value: Any) -> Any:
    if name == "truncate":
        if not isinstance(value, bool):
            raise ValueError(f"{name}={shown(value)}; expected true or false")
        return value
    whole, least = name == "original_max_position_embeddings", _LEAST.get(name, 0.0)
    most = MAX_POSITIONS if whole else 1 if name == SHARE else 2**40
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool) and least <= value <= most
    if not fits or (name == "rope_theta" and value == 1):
        bound = f"above {least:g}, and at most" if name == "rope_theta" else f"from {least:g} to"
        raise ValueError(f"{name}={shown(value)}; expected a {'whole ' if whole else ''}number {bound} {most:g}")
    return value if whole else float(value)


def complete_rope(parameters: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """A config's table, with the defaults that transformers fills in. longest: the config's max_position_embeddings."""
    result = {name: value for name, value in parameters.items() if name not in ("type", "rope_type")}
    result["rope_type"] = rope_type(parameters)
    if result["rope_type"] in ("llama3", "yarn"):
        if result.get("original_max_position_embeddings") is None:
            result["original_max_position_embeddings"] = longest
        original = result["original_max_position_embeddings"]
        if (
            result["rope_type"] == "yarn"
            and result.get("factor") is None
            and isinstance(original, int)
            and original > 0
        ):
            result["factor"] = longest / original
    return result


def rope_of(base_config: Any) -> dict[str, Any]:
    """The rope parameters of a base's text config; those of full attention if its layers differ.

    ValueError if a head cannot have them: they change with the length, rotate a part of each head, or are unknown.
    """
    found = getattr(base_config, "rope_parameters", None) or {}
    found = {**(found.get("full_attention") or found)}
    longest = getattr(base_config, "max_position_embeddings", None) or 2048
    if (original := getattr(base_config, "original_max_position_embeddings", None)) is not None:
        found["original_max_position_embeddings"] = original  # Phi-3 has it at this level, where it takes precedence
    result = complete_rope(found, longest)
    if (share := result.get("partial_rotary_factor")) not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor={shown(share)} rotates a part of each attention head; heads rotate all"
        )
    if result.get("rope_theta") is None:
        result["rope_theta"] = USUAL_THETA
    known = _OPTIONS.get(result["rope_type"], ((), ()))
    names = {"rope_type", "rope_theta", *known[0], *known[1]}
    return check_rope({name: value for name, value in result.items() if name in names})


def inherited_rope(base_config: Any) -> dict[str, Any]:
    """The rope parameters of a new head: its base's, so that both reach equally far; or unscaled ones of the same theta
    if a head cannot use those."""
    try:
        return rope_of(base_config)
    except ValueError:
        found = getattr(base_config, "rope_parameters", None) or {}
        theta = (found.get("full_attention") or found).get("rope_theta") or USUAL_THETA
        return check_rope({"rope_type": "default", "rope_theta": theta})


def rotated_width(head_dim: int, parameters: Mapping[str, Any]) -> int:
    """How many of a head's values are rotated. ValueError unless they are pairs."""
    width = int(head_dim * parameters.get(SHARE, 1))
    if width < 2 or width % 2:
        raise ValueError(
            f"{SHARE}={parameters.get(SHARE, 1):g} of head_dim={head_dim} is {width} values; expected pairs"
        )
    return width


def frequencies(head_dim: int, parameters: Mapping[str, Any]) -> tuple[Tensor, float]:
    """(r / 2,) float32 angles per position, r = `rotated_width`, and the factor that scales cos and sin."""
    kind, theta = parameters["rope_type"], parameters["rope_theta"]
    head_dim = rotated_width(head_dim, parameters)
    parameters = {name: value for name, value in parameters.items() if name != SHARE}
    if kind == "default":  # not among transformers' functions
        return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim), 1.0
    reach = int(parameters.get("original_max_position_embeddings", 2048) * parameters["factor"])
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=dict(parameters),
        max_position_embeddings=reach,  # no effect here, but transformers warns about a config that contradicts itself
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def refuse_overflow(head_dim: int | None, parameters: Mapping[str, Any]) -> None:
    """ValueError if rope parameters give no finite frequencies, for heads of any size if head_dim is None."""
    if head_dim is None:
        head_dim, parameters = 2, {name: value for name, value in parameters.items() if name != SHARE}
    try:
        angles, factor = frequencies(head_dim, parameters)
    except ArithmeticError as error:
        raise ValueError(f"{shown(dict(parameters))} gives no frequencies ({error})") from error
    if not (torch.isfinite(angles).all() and math.isfinite(factor)):
        raise ValueError(f"{shown(dict(parameters))} gives frequencies that are not finite")


MROPE_AXES = 3  # of a position beside images: time, height and width


def mrope_of(base_config: Any, head_dim: int) -> tuple[int, ...] | None:
    """The axis, of MROPE_AXES, that turns each of head_dim / 2 frequencies of a base with positions of several parts;
    None if it has none, or turns another number of them. Sections in a row, as Qwen2-VL's, or interleaved, as
    Qwen3-VL's."""
    found = getattr(base_config, "rope_parameters", None) or {}
    sections = found.get("mrope_section")
    if not sections or len(sections) != MROPE_AXES or sum(sections) != head_dim // 2:
        return None
    interleaved = found.get("mrope_interleaved")
    if interleaved is None:  # a base that always interleaves need not say so
        interleaved = getattr(base_config, "model_type", "").startswith(INTERLEAVED)
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    axes = [0] * (head_dim // 2)
    for axis in range(1, MROPE_AXES):
        for k in range(axis, min(MROPE_AXES * sections[axis], len(axes)), MROPE_AXES):
            axes[k] = axis
    return tuple(axes)


INTERLEAVED = ("qwen3_vl", "qwen3_5", "qwen3_omni")


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once and grown for longer texts. axes: see `mrope_of`."""

    def __init__(self, head_dim: int, rope: Mapping[str, Any], axes: Sequence[int] | None = None) -> None:
        super().__init__()
        self.head_dim, self.rope, self.axes = head_dim, rope, axes
        self._table: Tensor | None = None

    def place(self, position: Tensor, base: BasePositions | None) -> Tensor:
        """Tokens before each token (B, T) → what to rotate by: the same, or the base's positions (A, B, T) if the head
        rotates by their parts."""
        if self.axes is None or base is None:
            return position
        assert self._table is not None
        return base.at(position).clamp(max=self._table.shape[1] - 1)

    def ensure(self, positions: int, like: Tensor) -> None:
        table = self._table
        if table is None or table.shape[1] < positions or table.device != like.device or table.dtype != like.dtype:
            size = max(2048, 1 << (positions - 1).bit_length())  # few sizes, which compiled steps depend on
            self._table = self.compute(size, like)

    def compute(self, size: int, like: Tensor) -> Tensor:
        """cos and sin of the first `size` positions, (2, size, r)."""
        angles, factor = frequencies(self.head_dim, self.rope)
        angle = torch.outer(torch.arange(size, dtype=torch.float32, device=like.device), angles.to(like.device))
        both = torch.cat([angle, angle], -1)
        return (torch.stack([both.cos(), both.sin()]) * factor).to(like.dtype)

    def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) positions, or (A, B, T) from `place` → cos and sin (B, 1, T, r). Call `ensure` first."""
        assert self._table is not None
        both = self._table[:, position]
        if position.dim() == 3:
            assert self.axes is not None
            axis = torch.tensor([*self.axes, *self.axes], device=both.device)
            turns = axis == torch.arange(len(position), device=both.device).unsqueeze(1)  # (A, r)
            both = torch.where(turns[:, None, None], both, 0).sum(1)
        cos, sin = both.unsqueeze(2)
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the first r values of (B, heads, T, d), in Llama's half-split order. cos, sin (B, 1, T, r)."""
    if (width := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], -1)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], -1) * sin
