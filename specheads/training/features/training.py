"""A training run from saved features, without the base: the model, whose features come from the batch, and its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.data.datasets import token_counts
from specheads.decoding.verify.hf_base import UnsupportedModel, logits_of, refuse_unsupported, text_config
from specheads.decoding.verify.model_inputs import BasePositions
from specheads.heads import HEADS, DraftHead, DraftVocabulary, HeadConfig
from specheads.losses.functions import HARD, parse_loss
from specheads.losses.teacher import LiveTeacher, Teacher, TopKTail
from specheads.models import checkpoint, saved_head
from specheads.models.config import SpecConfig
from specheads.models.formats.importing import find_foreign
from specheads.models.spec_model import SpecModel
from specheads.training.features.dataset import FeatureCollator, FeatureDataset
from specheads.training.features.frozen_weights import KeptBase, skeleton
from specheads.training.features.index import Index, read_finished_index
from specheads.training.features.shards import FeatureError


class FeatureModel(SpecModel):
    """Takes batches of a FeatureCollator. Its checkpoints are ordinary SpecModel checkpoints, and name the base."""

    def observe_base(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Teacher, BasePositions | None]:
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
        places = kwargs.get("base_positions")
        if places is not None:
            places = BasePositions(places.permute(2, 0, 1), attention_mask.sum(1))
        return kwargs["features"], teacher, places

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)  # raises a clear error


Parts = tuple[FeatureModel, FeatureDataset, FeatureDataset | None, FeatureCollator]


def from_disk(
    folder: Path, head: HeadConfig | None, init_from: Any = None, dtype: str = "float32", autocast: str = "no"
) -> Parts:
    """Model, rows to train on, held-out rows and collator. head: a new head's options; init_from: a checkpoint to start
    from; dtype: the head's, "auto" for the base's; autocast: the run's, see `plan.autocast_of`.

    FeatureError if the folder is damaged or lacks what the head needs; UnsupportedModel if that kind of head cannot
    learn from that base; CheckpointError if init_from is a head of another base.
    """
    index = read_finished_index(folder)
    if (saved_under := index.base["autocast"]) != autocast:
        raise FeatureError(
            f"{folder} was saved under autocast {saved_under!r}, and this run computes under {autocast!r}, where the "
            "base gives other outputs: save the features with this run's training.bf16 and training.fp16, or train "
            "with theirs"
        )
    trained_length = None
    if init_from is not None and (foreign := find_foreign(init_from)) is not None:
        base = skeleton(folder)
        refuse_unsupported(base)
        config, tensors = foreign.read(base)
        refuse_unfit(folder, index, config)
        module = checkpoint.build_head(config, base, tensors)
        module.refuse_unfit(base)
    elif init_from is not None:
        saved = saved_head.read(init_from)
        trained_length = saved.config.trained_length
        if saved.config.joint:
            raise FeatureError(f"{init_from} was trained with adapters on its base, which {folder} was saved without")
        checkpoint.check_base(saved.config, index.base["fingerprint"], init_from)
        refuse_unfit(folder, index, saved.head)
        module = HEADS[saved.head.kind](saved.head)
        module.load_state_dict({name.removeprefix("head."): t.clone() for name, t in saved.tensors.items()})
    else:
        assert head is not None
        module = new_head(folder, index, head)
    module.to(getattr(torch, index.base["dtype"] if dtype == "auto" else dtype))
    train, *held_out = (FeatureDataset(folder, module.layers, split, index) for split in index.rows)
    name, revision, fingerprint = (index.base[key] for key in ("name", "revision", "fingerprint"))
    record = SpecConfig.of(module.config, name, revision, fingerprint, index.base.get("quantization"))
    model = FeatureModel(record, cast(PreTrainedModel, KeptBase(folder, name)), module)
    model.note_trained_length(trained_length)
    return model, train, held_out[0] if held_out else None, FeatureCollator(index.pad_token_id)


def new_head(folder: Path, index: Index, head: HeadConfig) -> DraftHead:
    """A new head, initialised as convert() does with the base itself; its draft vocabulary is counted on saved rows."""
    base = skeleton(folder)
    config = head.with_base_defaults(text_config(base)).with_base_positions(text_config(base))
    refuse_unfit(folder, index, config)
    module = HEADS[config.kind](config)
    module.refuse_unfit(base)
    module.copy_frozen_weights(base)
    module.initialise(base)
    if isinstance(module, DraftVocabulary) and module.target_ids is not None:
        rows = FeatureDataset(folder, (), index=index).labels()
        module.set_draft_vocabulary(token_counts(rows, len(module.t2d)), base)
    return module


def refuse_unfit(folder: Path, index: Index, config: HeadConfig) -> None:
    if reason := index.base["unfit"].get(config.kind):
        raise UnsupportedModel(reason)
    if index.teacher_probs == "none" and any(name != HARD for name, _ in parse_loss(config.loss)):
        raise FeatureError(
            f"loss {config.loss!r} needs the base's probabilities, and {folder} was saved with --teacher-probs none: "
            "save again with --teacher-probs hidden or 64, or give head.loss=hard"
        )
