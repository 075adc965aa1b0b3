"""Joint training: low-rank adapters on the base train together with the head, as in Medusa-2. arXiv:2401.10774.

The adapted base is then the model that is decoded, so the text differs from that of the base without adapters. A loss
against the base's distribution with the adapters off keeps it close.
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

from specheads.decoding.probs.divergences import forward_kl
from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.verify.hf_base import text_config
from specheads.heads import TapBatch
from specheads.losses.chunked import Add, chunked_sum, rows_of_chunk
from specheads.losses.targets import DraftTargets
from specheads.losses.teacher import LiveTeacher, Teacher, tap_base
from specheads.options import reason, refuse_unknown, require_packages, shown

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: it takes half a second

BASE_LOSSES = ("kl", "ce")
RAMPS = ("constant", "sine")
_MAX_RANK, _MAX_WEIGHT = 4096, 2**20  # far above any real one


@dataclass(frozen=True)
class JointConfig:
    """r, lora_alpha, lora_dropout, target_modules: as in peft's LoraConfig.
    base_loss: "kl" keeps the adapted base close to its distribution without adapters, for texts the base wrote itself;
      "ce" is the language modelling loss on the texts.
    head_weight: of the head's loss relative to the base's.
    ramp: "sine" raises head_weight over the run, by sin(π/2 · progress); evaluations use the full weight.
    Separate learning rates: training.head_lr_groups.
    """

    r: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    target_modules: str | tuple[str, ...] = "all-linear"
    base_loss: str = "kl"
    head_weight: float = 0.2
    ramp: str = "constant"

    def __post_init__(self) -> None:
        if type(self.r) is not int or not 1 <= self.r <= _MAX_RANK:
            raise ValueError(f"lora.r={shown(self.r)}: expected a whole number from 1 to {_MAX_RANK}")
        for name in ("lora_dropout", "lora_alpha", "head_weight"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | float):
                raise ValueError(f"lora.{name}={shown(value)}: expected a number")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora.lora_dropout={shown(self.lora_dropout)}: expected a share from 0 to below 1")
        if not (0 < self.lora_alpha <= _MAX_WEIGHT and 0 < self.head_weight <= _MAX_WEIGHT):
            raise ValueError(
                f"lora.lora_alpha={shown(self.lora_alpha)} and lora.head_weight={shown(self.head_weight)} must be "
                f"above 0, and at most {_MAX_WEIGHT}"
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
    def of(cls, options: JointConfig | LoraConfig | Mapping[str, Any]) -> JointConfig:
        """From options by name, or a peft LoraConfig. ValueError if that sets what a head checkpoint cannot store."""
        if isinstance(options, JointConfig):
            return options
        if not isinstance(options, Mapping):
            targets = options.target_modules
            config = cls(
                options.r, options.lora_alpha, options.lora_dropout,
                "all-linear" if targets is None else targets if isinstance(targets, str) else tuple(sorted(targets)),
            )  # fmt: skip
            kept, every = config.lora_config().to_dict(), options.to_dict()
            every |= {"target_modules": kept["target_modules"], "task_type": every["task_type"] or kept["task_type"]}
            if other := sorted(name for name, value in every.items() if kept.get(name) != value):
                raise ValueError(
                    f"the LoraConfig sets {', '.join(other)}, which a head checkpoint does not store; only r, "
                    "lora_alpha, lora_dropout and target_modules may differ from peft's defaults"
                )
            return config
        refuse_unknown(options, [field.name for field in fields(cls)], section="lora.")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
        }
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def lora_config(self) -> LoraConfig:
        require_packages("train", "peft")
        from peft import LoraConfig

        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return LoraConfig(
            r=self.r, lora_alpha=self.lora_alpha, lora_dropout=self.lora_dropout, target_modules=targets,
            task_type="CAUSAL_LM",
        )  # fmt: skip

    def weight(self, progress: float) -> float:
        """The weight of the head's loss once a share `progress` of the run is done."""
        return self.head_weight * (math.sin(math.pi / 2 * progress) if self.ramp == "sine" else 1.0)


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def adapted_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Names of adapter tensors in a checkpoint, `base.….lora_…` → the modules of the base that they adapt."""
    return tuple(sorted({name.removeprefix("base.").partition(".lora_")[0] for name in names if is_adapter(name)}))


def attach(base: PreTrainedModel, config: JointConfig) -> None:
    """Add float32 adapters to `base`, which change nothing yet. ValueError, leaving the base as it was, if it already
    has adapters, has none of the target modules, or has experts among them."""
    if any(is_adapter(name) for name, _ in base.named_parameters()):
        raise ValueError("the base already has adapters: merge them (merge_and_unload) or convert it without lora")
    options = config.lora_config()
    refused = ""
    try:
        base.add_adapter(options)
    except ValueError as error:
        refused = f"adapters cannot be added to the base: {reason(error)}"
    # A name that used to be each expert's makes peft adapt the one matrix that now holds all experts.
    if options.target_parameters:
        refused = (
            f"lora.target_modules={shown(config.target_modules)} adapts the experts of {type(base).__name__}, and a "
            "head checkpoint keeps adapters of linear layers alone; name those, such as [q_proj, k_proj, v_proj]"
        )
    if refused:
        detach(base)
        raise ValueError(refused)
    for parameter in adapters(base):
        parameter.data = parameter.data.float()


def detach(base: PreTrainedModel) -> None:
    """Remove the adapters that `attach` added, even if it failed part-way."""
    from peft.tuners.lora import LoraLayer

    for module in list(base.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, LoraLayer):
                setattr(module, name, layer.get_base_layer())
    others = getattr(base, "peft_config", {})
    others.pop("default", None)
    base._hf_peft_config_loaded = bool(others)


def adapters(base: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in base.named_parameters() if is_adapter(name)]


def base_loss(config: JointConfig, batch: TapBatch, adapted: LiveTeacher, base: Any, attention_mask: Any) -> Tensor:
    """The adapted base's loss over the batch's supervised tokens. adapted: its outputs, with gradients."""
    from peft.helpers import rescale_adapter_scale

    targets = DraftTargets.from_batch(batch.tokens, batch.supervised, batch.documents, 1)
    reference: Teacher | None = None
    if config.base_loss == "kl":
        with torch.no_grad(), rescale_adapter_scale(base, 0.0):
            _, reference = tap_base(base, batch.tokens, attention_mask, batch.position_ids, ())

    def compute(add: Add, span: slice, rows: Tensor) -> tuple[Tensor, ...]:
        logits = at_least_float32(adapted.project(rows))
        if reference is None:
            add(cross_entropy(logits, targets.tokens[span], reduction="sum"))
        else:
            add(forward_kl(logits.log_softmax(-1), reference.probs(targets.positions[span], None).log_p).sum())
        return ()

    chunk = rows_of_chunk(2 * text_config(base).vocab_size, batch.tokens.device)
    total, _ = chunked_sum(compute, [adapted.outputs[targets.positions]], (), chunk)
    return total / batch.denominator
