"""Joint training: low-rank adapters on the base train together with the head, as in Medusa-2. arXiv:2401.10774.

The adapted base is the model that is decoded, so its text differs from that of the base without adapters. A loss
against the base's distribution with the adapters off keeps the two close.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from specheads.decoding.precision import at_least_float32
from specheads.decoding.target.causal import text_config
from specheads.heads import TapBatch
from specheads.losses.chunked import Steps, chunked_sum
from specheads.losses.functions import kl
from specheads.losses.objective import DraftTargets, rows_of_chunk
from specheads.losses.teacher import LiveTeacher, Teacher, tapped
from specheads.options import reason, refuse_unknown, shown

if TYPE_CHECKING:
    from peft import LoraConfig  # imported where it is used: half a second

BASE_LOSSES = ("kl", "ce")
RAMPS = ("constant", "sine")
_MOST_RANK, _MOST_WEIGHT = 4096, 2**20  # far above any there is


@dataclass(frozen=True)
class JointConfig:
    """r, lora_alpha, lora_dropout, target_modules: of the adapters, as in peft's LoraConfig. base_loss: "kl" keeps the
    adapted base close to its original distribution, for texts that the base wrote itself; "ce" is the language model
    loss on the texts. head_weight: of the head's loss beside the base's; ramp: "sine" raises it over the run,
    sin(π/2 · progress). Separate learning rates: training.head_lr_groups."""

    r: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    target_modules: str | tuple[str, ...] = "all-linear"
    base_loss: str = "kl"
    head_weight: float = 0.2
    ramp: str = "constant"

    def __post_init__(self) -> None:
        if type(self.r) is not int or not 1 <= self.r <= _MOST_RANK:
            raise ValueError(f"lora.r={shown(self.r)}: expected a whole number from 1 to {_MOST_RANK}")
        for name in ("lora_dropout", "lora_alpha", "head_weight"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | float):
                raise ValueError(f"lora.{name}={shown(value)}: expected a number")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora.lora_dropout={shown(self.lora_dropout)}: expected a share from 0 to below 1")
        if not (0 < self.lora_alpha <= _MOST_WEIGHT and 0 < self.head_weight <= _MOST_WEIGHT):
            raise ValueError(
                f"lora.lora_alpha={shown(self.lora_alpha)} and lora.head_weight={shown(self.head_weight)} must be "
                f"above 0, and at most {_MOST_WEIGHT}"
            )
        named = (self.target_modules,) if isinstance(self.target_modules, str) else self.target_modules
        if not isinstance(named, tuple) or not named or not all(isinstance(name, str) for name in named):
            raise ValueError(
                f"lora.target_modules={shown(self.target_modules)}: expected the name of modules, or several names"
            )
        if self.base_loss not in BASE_LOSSES:
            raise ValueError(f"lora.base_loss={shown(self.base_loss)}: expected one of {', '.join(BASE_LOSSES)}")
        if self.ramp not in RAMPS:
            raise ValueError(f"lora.ramp={shown(self.ramp)}: expected one of {', '.join(RAMPS)}")

    @classmethod
    def of(cls, given: JointConfig | LoraConfig | Mapping[str, Any]) -> JointConfig:
        """From options by name, or a peft LoraConfig that asks for nothing a head checkpoint cannot hold."""
        if isinstance(given, JointConfig):
            return given
        if not isinstance(given, Mapping):
            targets = given.target_modules
            joint = cls(
                given.r, given.lora_alpha, given.lora_dropout,
                "all-linear" if targets is None else targets if isinstance(targets, str) else tuple(sorted(targets)),
            )  # fmt: skip
            plain, whole = joint.lora_config().to_dict(), given.to_dict()
            whole["target_modules"] = plain["target_modules"]
            if other := sorted(name for name, value in whole.items() if plain.get(name) != value):
                raise ValueError(
                    f"the LoraConfig sets {', '.join(other)}, which a head checkpoint does not store; only r, "
                    "lora_alpha, lora_dropout and target_modules may differ from peft's defaults"
                )
            return joint
        refuse_unknown(given, [field.name for field in fields(cls)], section="lora.")
        listed: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        return cls(**listed)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def lora_config(self) -> LoraConfig:
        from peft import LoraConfig

        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return LoraConfig(
            r=self.r, lora_alpha=self.lora_alpha, lora_dropout=self.lora_dropout, target_modules=targets,
            task_type="CAUSAL_LM",
        )  # fmt: skip

    def weight(self, progress: float) -> float:
        """Weight of the head's loss at `progress`, the share of the run that is done."""
        return self.head_weight * (math.sin(math.pi / 2 * progress) if self.ramp == "sine" else 1.0)


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def adapted_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The modules of a base that have adapters, from tensor names of a checkpoint, `base.….lora_…`."""
    return tuple(sorted({name.removeprefix("base.").partition(".lora_")[0] for name in names if is_adapter(name)}))


def attach(base: PreTrainedModel, config: JointConfig) -> None:
    """Add new adapters in float32 to `base`; until trained they change nothing.

    ValueError if the base already has adapters, or none of the modules; the base is then unchanged."""
    if any(is_adapter(name) for name, _ in base.named_parameters()):
        raise ValueError("the base already has adapters: merge them (merge_and_unload) or convert it without lora")
    loaded = base._hf_peft_config_loaded
    try:
        base.add_adapter(config.lora_config())
    except ValueError as error:
        base._hf_peft_config_loaded = loaded  # transformers has set it already
        raise ValueError(f"adapters cannot be added to the base: {reason(error)}") from error
    for parameter in adapters(base):
        parameter.data = parameter.data.float()


def detach(base: PreTrainedModel) -> None:
    """Remove the adapters that `attach` added."""
    base.delete_adapter("default")


def adapters(base: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in base.named_parameters() if is_adapter(name)]


def base_loss(config: JointConfig, batch: TapBatch, own: LiveTeacher, base: Any, attention_mask: Any) -> Tensor:
    """The adapted base's own loss on the supervised tokens of a batch. own: its distribution, with gradients."""
    from peft.helpers import rescale_adapter_scale

    asked = DraftTargets.of(batch.tokens, batch.supervised, batch.documents, 1)
    reference: Teacher | None = None
    if config.base_loss == "kl":
        with torch.no_grad(), rescale_adapter_scale(base, 0.0):
            _, reference = tapped(base, batch.tokens, attention_mask, batch.position_ids, ())

    def compute(here: slice, part: Tensor) -> Steps:
        logits = at_least_float32(own.project(part))
        if reference is None:
            yield cross_entropy(logits, asked.tokens[here], reduction="sum")
        else:
            yield kl(logits.log_softmax(-1), reference.probs(asked.positions[here], None).log_p).sum()
        return ()

    chunk = rows_of_chunk(2 * text_config(base).vocab_size, batch.tokens.device)
    total, _ = chunked_sum(compute, [own.rows(asked.positions)], (), chunk)
    return total / batch.denominator
