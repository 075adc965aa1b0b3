"""SpecConfig: the contents of a head checkpoint's config.json."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from specheads.heads import HEADS, HeadConfig, head_kind

# Sizes of the base by the names of transformers' configs; not what would change how a model is loaded or run.
BASE_SIZES = frozenset((
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length",
    "max_seq_len", "seq_length", "n_embd", "n_layer", "n_head", "d_model",
))  # fmt: skip


class SpecConfig(PreTrainedConfig):
    """The head's options, and the base it was trained for.

    base_class: that base's class (None: not recorded). base_quantization: how it was quantised. joint: options of the
    adapters trained with the head, if any. trained_length: tokens of the longest text it was trained on (None: not
    recorded)."""

    model_type = "specheads"

    def __init__(
        self,
        head: dict[str, Any] | None = None,
        base_model_name_or_path: str | None = None,
        base_revision: str | None = None,
        base_fingerprint: dict[str, Any] | None = None,
        joint: dict[str, Any] | None = None,
        base_quantization: dict[str, Any] | None = None,
        trained_length: int | None = None,
        base_class: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.head = head or {}
        self.base_model_name_or_path = base_model_name_or_path
        self.base_revision = base_revision
        self.base_fingerprint = base_fingerprint or {}
        self.joint = joint
        self.base_quantization = base_quantization
        self.trained_length = trained_length
        self.base_class = base_class

    def describe_base(self, base: PreTrainedConfig) -> None:
        """From now on this config answers BASE_SIZES for the base, as evaluation tools read them from a model's config.
        Nothing of it is saved."""
        self._base = base

    def __getattr__(self, name: str) -> Any:
        # Python asks here only for what this config lacks.
        base = vars(self).get("_base") if name in BASE_SIZES else None
        for config in () if base is None else (base, base.get_text_config(decoder=True)):
            if hasattr(config, name):
                return getattr(config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if name != "_base"}

    @classmethod
    def of(
        cls, head: HeadConfig, name: str | None = None, revision: str | None = None,
        fingerprint: dict[str, Any] | None = None, quantization: dict[str, Any] | None = None,
    ) -> SpecConfig:  # fmt: skip
        """The config of a head with these (complete) options, and what is known of its base."""
        return cls(
            head=head.to_dict(), base_model_name_or_path=name, base_revision=revision, base_fingerprint=fingerprint,
            base_quantization=quantization, architectures=["SpecModel"],
        )  # fmt: skip

    def head_config(self) -> HeadConfig:
        options = dict(self.head)
        config = HEADS[head_kind(options.pop("kind", None))].Config
        return config.from_options(config.unrecorded | options)


AutoConfig.register(SpecConfig.model_type, SpecConfig)
