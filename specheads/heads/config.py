"""Options of heads: those of every head, and those of heads with decoder layers. Each head adds its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from specheads.decoding.planner import STATIC_DEPTH, StaticTree, static_choices
from specheads.decoding.verify.hf_base import first_layer
from specheads.decoding.verify.masks import Reach
from specheads.decoding.verify.taps import refuse_missing_taps
from specheads.heads.layers.block import ACTIVATIONS, DecoderBlock
from specheads.heads.layers.rope import (
    RotaryTable,
    check_rope,
    inherited_rope,
    mrope_of,
    refuse_overflow,
)
from specheads.heads.layers.windows import block_reaches, check_windows
from specheads.heads.limits import DEEPEST, check_choices, check_options
from specheads.losses.functions import parse_loss
from specheads.options import refuse_unknown, shown


@dataclass(frozen=True)
class HeadConfig:
    """Options of a head. `with_base_defaults` takes each size that is None from the base's config.

    loss: one of `losses.functions.DISTRIBUTION_LOSSES`, 'hard', or a weighted sum such as 'hard:0.1,tv:1.8'.
    dpace: the floor of D-PACE's position weights (0.5 as published); None weights by depth alone.
    tree: the default static tree, as text ("chain:4") or as choices, each a path of ranks, as found by
      `calibration.calibrate_tree`; None: the usual tree of this kind of head on the device.

    A subclass sets `kind`, adds its options as fields, and overrides the properties below where they differ.
    """

    kind: ClassVar[str] = ""
    title: ClassVar[str] = ""  # in a model card; "" for the kind
    loss_terms: ClassVar[tuple[str, ...]] = ()  # reported by `loss` besides those of every head
    aliases: ClassVar[dict[str, str]] = {}  # other spellings of options → their names here
    unrecorded: ClassVar[dict[str, Any]] = {}  # options older checkpoints lack → their value there, if not the default
    bounds: ClassVar[dict[str, tuple[float, float]]] = {}  # least and greatest value, of options not in limits.BOUNDS

    hidden_size: int | None = None
    vocab_size: int | None = None
    loss: str = "ce"
    dpace: float | None = None
    tree: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tree, str | StaticTree):
            object.__setattr__(self, "tree", static_choices(self.tree, self.fixed_depth or STATIC_DEPTH))
        check_options(self)
        parse_loss(self.loss)
        if self.tree is not None:
            check_choices(self.kind, self.tree, self.max_depth, self.output_size)
            object.__setattr__(self, "tree", StaticTree(self.tree).choices)  # ValueError if the choices form no tree

    @property
    def layers(self) -> tuple[int, ...]:
        """The base's states that the head reads, see Drafter.layers."""
        return ()

    @property
    def fixed_depth(self) -> int | None:
        """How many depths are drafted, if each has a network of its own; None if one network drafts every depth."""
        return None

    @property
    def max_depth(self) -> int:
        """Tokens of the longest draft."""
        return self.fixed_depth or DEEPEST

    @property
    def served_depth(self) -> int:
        """Tokens of a draft when another program serves the head."""
        return self.max_depth

    @property
    def output_size(self) -> int | None:
        """The size of the draft vocabulary, Vd; None until the sizes are filled in."""
        return self.vocab_size

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """From options by name, other toolkits' spellings included. ValueError for an unknown one."""
        refuse_unknown(options, [*(f.name for f in fields(cls)), *cls.aliases], what=f"{cls.kind} head option")
        values: dict[str, Any] = {}
        for name, value in options.items():
            key = cls.aliases.get(name, name)
            if key in values:
                raise ValueError(f"{cls.kind} head option {key!r} is given twice (once as {name!r})")
            values[key] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        """The values of options that are None, beside a base with this text config."""
        return {"hidden_size": base_config.hidden_size, "vocab_size": base_config.vocab_size}

    def with_base_defaults(self, base_config: Any) -> Self:
        """A copy without missing sizes. ValueError if the base lacks a state that the head reads."""
        defaults = self.base_defaults(base_config)
        config = replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})
        refuse_missing_taps(config.layers, base_config)
        return config

    def with_base_positions(self, base_config: Any) -> Self:
        """For a new head: a copy that rotates by the parts of the base's positions, if it attends and these have some.
        Heads from elsewhere, and older ones, count tokens."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}}


@dataclass(frozen=True)
class DecoderConfig(HeadConfig):
    """Options of a head with decoder blocks. num_layers: how many. Other sizes: None means the base's.

    rope_parameters: as in a transformers 5 config, with rope_type default, linear, llama3 or yarn. The option
    rope_theta alone means rope_type default with that theta. partial_rotary_factor among them: the share of each head
      that is rotated, the first values. mrope_axes: beside images, the part of the base's position (0 time, 1 height,
      2 width) by which each of head_dim / 2 frequencies turns, set by convert(); None: by the count of tokens.
    hidden_act: of the MLP's gate: silu, gelu or gelu_pytorch_tanh.
    sliding_window: positions that a block attends to, its own included; None: all. layer_types: 'sliding_attention' or
      'full_attention' for each block (default: every block has the window, if there is one).
    """

    num_layers: int = 1
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rms_norm_eps: float | None = None
    rope_parameters: dict[str, Any] | None = None
    mrope_axes: tuple[int, ...] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"{self.kind} head option hidden_act={shown(self.hidden_act)}; known: {known}")
        check_windows(self.kind, self.sliding_window, self.layer_types, self.num_blocks)
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads and shared and heads % shared:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={shared}")
        if self.head_dim and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, for RoPE")
        if self.mrope_axes is not None and self.rotated_size and len(self.mrope_axes) != self.rotated_size // 2:
            raise ValueError(
                f"{self.kind} head option mrope_axes={shown(self.mrope_axes)}: expected one for each of "
                f"{self.rotated_size // 2} frequencies"
            )
        if self.rope_parameters is not None:
            try:
                object.__setattr__(self, "rope_parameters", check_rope(self.rope_parameters))
                refuse_overflow(self.head_dim, self.rope_parameters)
            except ValueError as error:
                raise ValueError(f"{self.kind} head option rope_parameters: {error}") from error

    @property
    def num_blocks(self) -> int:
        return self.num_layers

    @property
    def rotated_size(self) -> int | None:
        """The size of what is rotated of each query and key; rope_parameters may rotate a part of that."""
        return self.head_dim

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """How far back each block looks."""
        return block_reaches(self.sliding_window, self.layer_types, self.num_blocks)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        # Older heads were saved with rope_theta alone.
        renamed = {name: value for name, value in options.items() if name != "rope_theta"}
        if (theta := options.get("rope_theta")) is not None:
            if renamed.get("rope_parameters") is not None:
                raise ValueError(f"{cls.kind} head options rope_theta and rope_parameters: give theta in the latter")
            renamed["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        return super().from_options(renamed)

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        defaults = super().base_defaults(base_config)
        size: int = self.hidden_size or defaults["hidden_size"]
        base_config = first_layer(base_config)
        heads = self.num_attention_heads or getattr(base_config, "num_attention_heads", None) or 8
        while size % heads and not (self.head_dim or self.num_attention_heads):
            heads //= 2
        head_dim = getattr(base_config, "head_dim", None) or size // heads
        key_value = getattr(base_config, "num_key_value_heads", None) or heads
        inner = getattr(base_config, "intermediate_size", None) or getattr(base_config, "ffn_hidden_size", None)
        return {
            **defaults,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value if heads % key_value == 0 else heads,
            "head_dim": head_dim + head_dim % 2,
            "intermediate_size": inner or 4 * size,
            "rms_norm_eps": getattr(base_config, "rms_norm_eps", None) or 1e-6,
            "rope_parameters": self.rope_parameters or inherited_rope(base_config),
        }

    def block(self, input_size: int) -> DecoderBlock:
        """A decoder block of these sizes, none of them None, whose attention reads inputs of `input_size`."""
        return DecoderBlock(input_size=input_size, **self.block_sizes())

    def block_sizes(self) -> dict[str, Any]:
        """The sizes of a block, none of them None, by the names of DecoderBlock's arguments."""
        sizes = {
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_heads": self.num_attention_heads, "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim, "rms_norm_eps": self.rms_norm_eps,
        }  # fmt: skip
        assert all(sizes.values())
        biases = {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        return {**sizes, **biases, "hidden_act": self.hidden_act}

    def rotary(self) -> RotaryTable:
        assert self.rotated_size and self.rope_parameters
        return RotaryTable(self.rotated_size, self.rope_parameters, self.mrope_axes)

    def with_base_positions(self, base_config: Any) -> Self:
        if self.mrope_axes is not None or self.rotated_size is None:
            return self
        return replace(self, mrope_axes=mrope_of(base_config, self.rotated_size))
