"""romsto's beam search, with GNMT's length penalty, on top of transformers' beam search."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, TopKLogitsWarper

from specheads.compat.debug import BeamPrinter, Printer
from specheads.compat.plain import checked_id, checked_ids, checked_model, on_device, room_for
from specheads.compat.processors import whole
from specheads.compat.romsto import EndTokens, end_tokens
from specheads.decoding.generation.hf_options import NEUTRAL, check_prompts
from specheads.options import require_number


@dataclass(frozen=True)
class GNMTPenalty:
    """Replaces transformers' length_penalty, the exponent of a text's length.

    length ** penalty evaluates to ((min_length + length) / (min_length + 1)) ** alpha. Wu et al., arXiv:1609.08144,
    with min_length in place of their 5."""

    min_length: float
    alpha: float

    def __rpow__(self, length: int) -> float:
        return self.of(length)

    def of(self, length: int) -> float:
        """The divisor of Σ log p for a text of `length` tokens."""
        return float(((self.min_length + length) / (self.min_length + 1)) ** self.alpha)

    def __gt__(self, other: float) -> bool:
        return self.alpha > other


class _FewFollowers(LogitsProcessor):
    """Lets each beam continue only with its top_k likeliest tokens; the prompt (`start` ids) with as many as there are
    beams."""

    def __init__(self, top_k: int, num_beams: int, start: int) -> None:
        self.first, self.later, self.start = TopKLogitsWarper(num_beams), TopKLogitsWarper(top_k), start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return (self.first if input_ids.shape[1] == self.start else self.later)(input_ids, scores)


def beam_search_generate(
    inputs: list[int],
    model: PreTrainedModel,
    max_gen_len: int = 40,
    num_beams: int = 4,
    top_k: int = 3,
    min_length: float = 5.0,
    alpha: float = 1.2,
    eos_tokens_id: EndTokens = 1,
    pad_token_id: int | None = 0,
    debug: bool = False,
    tokenizer: Any = None,
    *,
    end_tokens_id: EndTokens | None = None,
) -> list[int]:
    """The new ids of the text with the largest Σ log p / ((min_length + l) / (min_length + 1))^alpha, l its length.

    num_beams texts are continued at a time, each with its top_k likeliest tokens. Finished texts are set aside and take
    no beam from unfinished ones; the search ends when no unfinished text can overtake them. pad_token_id also ends a
    text, unless it is None. debug: print the candidates of each step, as ids without a tokenizer. An encoder-decoder's
    ids start with the decoder's start token, which is not scored.
    """
    model, prompt = checked_model("model", model), checked_ids("inputs", inputs)
    ends = end_tokens(eos_tokens_id, end_tokens_id)
    if pad_token_id is not None:
        ends.append(checked_id("pad_token_id", pad_token_id))
    num_beams, top_k = whole("num_beams", num_beams), whole("top_k", top_k)
    require_number("min_length", min_length)
    require_number("alpha", alpha)
    if not (min_length > -1 and alpha >= 0):
        raise ValueError(f"min_length={min_length} must be above -1 and alpha={alpha} at least 0")
    ids, penalty, printer = on_device(torch.tensor([prompt]), model), GNMTPenalty(min_length, alpha), None
    check_prompts(model, ids, images=False)
    apart = bool(model.config.is_encoder_decoder)  # its text starts with the decoder's start token only
    start = 1 if apart else len(prompt)
    processors: list[LogitsProcessor] = [_FewFollowers(top_k, num_beams, start)]
    if debug:
        printer = Printer(tokenizer, ends)
        processors.append(BeamPrinter(printer, start, penalty.of))
    # transformers' beam search needs at least one end token; no token has the id −1.
    out: Tensor = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), custom_generate=partial(_search, penalty=penalty),
        logits_processor=LogitsProcessorList(processors), max_new_tokens=room_for(model, len(prompt), max_gen_len),
        do_sample=False, early_stopping="never", eos_token_id=ends or [-1], pad_token_id=0,
        return_dict_in_generate=False, **{**NEUTRAL, "num_beams": num_beams, "stop_strings": None},
    )  # fmt: skip
    generated = out[0, start:].tolist()
    text = generated[: next((index + 1 for index, token in enumerate(generated) if token in ends), len(generated))]
    if printer:
        printer.close(text)
    return out[0, :start].tolist() + text if apart else text


def _search(model: Any, input_ids: Tensor, *args: Any, penalty: GNMTPenalty, **kwargs: Any) -> Tensor:
    kwargs["generation_config"].length_penalty = penalty
    return type(model)._beam_search(model, input_ids, *args, **kwargs)
