"""https://github.com/lfsszd/CS-Drafting: csd(), and the names its scripts wrap their models in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import specheads
from specheads.compat.plain import generate_plainly
from specheads.drafters import DraftModel, MaxGram


def csd(
    draft_list: Sequence[Any],
    target_model: PreTrainedModel,
    initial_input: Tensor,
    input_ids: Tensor,
    k_matrix: Any,
    max_length: int = 200,
    leniency: float = 1,
) -> Tensor:
    """input_ids (1, T), and at most max_length new ids behind them, up to and with the target's end token.

    draft_list: models from large to small, and what `get_mag_model` gives at the end. initial_input (1, S): what an
    encoder reads, where the target has one. k_matrix, leniency: see `Cascade`. Greedy, and token for token the
    target's own text whatever the leniency, which acts between drafts alone.
    """
    drafter = specheads.Cascade(
        [DraftModel(draft) if isinstance(draft, PreTrainedModel) else draft for draft in draft_list],
        torch.as_tensor(k_matrix).tolist(), leniency=float(leniency),
    )  # fmt: skip
    ids, options = input_ids, dict[str, Any]()
    if target_model.config.is_encoder_decoder:
        ids, options = initial_input, {"decoder_input_ids": input_ids.to(target_model.device)}
    return generate_plainly(target_model, ids, max_length, drafter=drafter, **options).sequences


def CSDraftingDecoderModel(model: PreTrainedModel, *args: Any, **kwargs: Any) -> PreTrainedModel:
    """The model itself, which needs no wrapping. sample, name and vocab_size are taken and not read."""
    return model


CSDraftingEncoderDecoderModel = CSDraftingDecoderModel


class CSDraftingMaGModel(MaxGram):
    """`MaxGram` with the calls that put a model on a device; it has nothing to put there."""

    def cuda(self, *args: Any) -> CSDraftingMaGModel:
        return self

    to = cpu = cuda


def get_mag_model(bi_gram_path: str | Path, is_decoder_only: bool = True) -> CSDraftingMaGModel:
    """MaG over a bigram file, which must have an entry for each id of the target's vocabulary."""
    return CSDraftingMaGModel(bigrams=tuple(json.loads(Path(bi_gram_path).read_text("utf8"))))
