"""romsto's beam search, with the length penalty of GNMT, through transformers' own beam search."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, TopKLogitsWarper

from specheads.compat.plain import PLAIN, room_for
from specheads.planner.plan import positive


@dataclass(frozen=True)
class GNMTPenalty:
    """What stands in place of transformers' length_penalty, which it has as the exponent of a text's length:
    length ** penalty is ((min_length + length) / (min_length + 1)) ** alpha. Wu et al., arXiv:1609.08144, with
    min_length for their 5."""

    min_length: float
    alpha: float

    def __rpow__(self, length: int) -> float:
        return float(((self.min_length + length) / (self.min_length + 1)) ** self.alpha)

    def __gt__(self, other: float) -> bool:
        return self.alpha > other


class _FewFollowers(LogitsProcessor):
    """Each beam goes on with its top_k likeliest tokens only; the prompt with as many as there are beams."""

    def __init__(self, top_k: int, num_beams: int, prompt_length: int) -> None:
        self.first, self.later, self.prompt_length = TopKLogitsWarper(num_beams), TopKLogitsWarper(top_k), prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return (self.first if input_ids.shape[1] == self.prompt_length else self.later)(input_ids, scores)


def beam_search_generate(
    inputs: list[int],
    model: PreTrainedModel,
    max_gen_len: int = 40,
    num_beams: int = 4,
    top_k: int = 3,
    min_length: float = 5.0,
    alpha: float = 1.2,
    eos_tokens_id: int | list[int] = 1,
    pad_token_id: int = 0,
    debug: bool = False,
    tokenizer: Any = None,
) -> list[int]:
    """The new ids of the text of the largest Σ log p / ((min_length + l) / (min_length + 1))^alpha, l its length.

    num_beams texts go on at a time, each with its top_k likeliest tokens. Finished texts are kept aside, so that they
    take no beam from those that go on, and the search ends when none of these can overtake them. debug and tokenizer
    are taken and not read.
    """
    positive("num_beams", num_beams)
    positive("top_k", top_k)
    if not (min_length > -1 and alpha >= 0):
        raise ValueError(f"min_length={min_length} must be above -1 and alpha={alpha} at least 0")
    ids = torch.tensor([inputs], device=model.device)
    search = partial(_search, penalty=GNMTPenalty(min_length, alpha))
    followers = _FewFollowers(top_k, num_beams, len(inputs))
    out: Tensor = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), custom_generate=search,
        logits_processor=LogitsProcessorList([followers]), max_new_tokens=room_for(model, len(inputs), max_gen_len),
        do_sample=False, early_stopping="never", eos_token_id=eos_tokens_id, pad_token_id=pad_token_id,
        return_dict_in_generate=False, **{**PLAIN, "num_beams": num_beams},
    )  # fmt: skip
    found = out[0, len(inputs) :].tolist()
    ends = {eos_tokens_id} if isinstance(eos_tokens_id, int) else set(eos_tokens_id)
    return found[: next((place + 1 for place, token in enumerate(found) if token in ends), len(found))]


def _search(model: Any, input_ids: Tensor, *args: Any, penalty: GNMTPenalty, **kwargs: Any) -> Tensor:
    kwargs["generation_config"].length_penalty = penalty
    return type(model)._beam_search(model, input_ids, *args, **kwargs)
