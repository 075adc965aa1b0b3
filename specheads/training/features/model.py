"""A SpecModel that trains its head on saved features: the same forward(), with features taken from the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import logits_of
from specheads.heads import DraftHead
from specheads.losses.teacher import LiveTeacher, Teacher, TopKTail
from specheads.models.config import SpecConfig
from specheads.models.spec_model import SpecModel
from specheads.training.features.frozen_weights import KeptBase
from specheads.training.features.index import Index


class FeatureModel(SpecModel):
    """Takes batches of a FeatureCollator. Its checkpoints are ordinary SpecModel checkpoints, and name the base."""

    def observe_base(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Teacher]:
        if "features" not in kwargs:
            raise ValueError("a batch without features, in training from saved ones: FeatureCollator makes them")
        hidden = kwargs.get("last_hidden")
        topk = [kwargs.get(name) for name in ("topk_ids", "topk_log_p", "topk_tail")]
        if hidden is not None:
            teacher: Teacher = LiveTeacher(hidden.flatten(0, 1), lambda rows: logits_of(self.base, rows))
        elif topk[0] is not None:
            teacher = TopKTail(*(cast(Tensor, part).flatten(0, 1) for part in topk))
        else:
            teacher = TopKTail.from_text(input_ids)
        return kwargs["features"], teacher

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)  # raises a clear error


def build_feature_model(folder: Path, index: Index, module: DraftHead) -> FeatureModel:
    """A head with the saved parts of its base."""
    name, revision, fingerprint = (index.base[key] for key in ("name", "revision", "fingerprint"))
    record = SpecConfig.of(module.config, name, revision, fingerprint, index.base.get("quantization"))
    return FeatureModel(record, cast(PreTrainedModel, KeptBase(folder, name)), module)
