"""Options of the MTP head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from specheads.heads.mtp.target_layers import TargetLayers, check_table, config_table, read_table
from specheads.heads.unrolled import UnrolledConfig


@dataclass(frozen=True)
class MtpConfig(UnrolledConfig):
    """num_modules: one per depth; module j mod num_modules drafts at depth j.
    target_config: the target's text config, from which the modules' layers are made (default: the base's).
    layer_indices: the target's layers that a module's are modelled on (default: the last with full attention).
    steps: how many training-time test unrolls, at least one per module. step_decay: step s has weight step_decay^s.
    hidden_first: the projection's input has the hidden state before the embedding. fc_bias: the projection has a bias.
    final_norm: a norm after the layers. norm_output: the next module or step reads the output after that norm.
    zero_first_embedding: the embedding at a text's first position is zero, as vLLM has it for some families.
    sliding_window: positions that the modules attend to, their own included, where the target's layers have full
      attention (default: all). Layers with windows of the target's keep those.
    """

    kind: ClassVar[str] = "mtp"
    title: ClassVar[str] = "MTP"
    aliases: ClassVar[dict[str, str]] = {
        "num_nextn_predict_layers": "num_modules", "num_mtp_layers": "num_modules",
        "mtp_num_hidden_layers": "num_modules",
    }  # fmt: skip

    num_modules: int = 1
    target_config: dict[str, Any] | None = None
    layer_indices: tuple[int, ...] | None = None
    steps: int = 5
    step_decay: float = 0.8
    hidden_first: bool = False
    fc_bias: bool = False
    final_norm: bool = True
    norm_output: bool = True
    zero_first_embedding: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < self.num_modules:
            raise ValueError(
                f"mtp head options steps={self.steps} and num_modules={self.num_modules}: modules past the last step "
                "would learn nothing; give at least as many steps"
            )
        if self.taps is not None and len(self.taps) != 1:
            raise ValueError(f"an mtp head reads one layer, not taps={self.taps}")
        if self.layer_indices is not None and not self.layer_indices:
            raise ValueError("mtp head option layer_indices names no layer")
        if self.target_config is not None:
            check_table(self.target_config)

    @property
    def num_attention_heads(self) -> int:
        """The target layers', from which training estimates its memory."""
        assert self.target_config is not None
        return read_table(self.target_config).num_attention_heads

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        defaults = super().base_defaults(base_config)
        table = defaults["target_config"] = self.target_config or config_table(base_config)
        if self.layer_indices is None:
            defaults["layer_indices"] = TargetLayers(table).usual_indices()
        return defaults
