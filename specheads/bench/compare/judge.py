"""What a text is worth: how far it is from the target's distribution, alike for every rule, since it is measured from
the text alone; and what a cascade's reviews cost.

p is the target's distribution. Shapes: T generated tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from specheads.bench import cost
from specheads.decoding.drafters import Cascade
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.verify.seq2seq import decoder_start


@torch.inference_mode()
def distance(
    base: PreTrainedModel, prompt: Sequence[int], text: Sequence[int], temperature: float = 0.0, top_k: int = 0
) -> tuple[float, int]:
    """How far a text after a prompt is from the target's distribution: the sum over its tokens in nats, and the number
    of tokens with p = 0, which are left out of the sum.

    temperature 0: Σ log(max p / p(x)), p at temperature 1. Greedy text is a point mass at each token; its KL from p is
    −log p(x). This is that KL minus the KL of the target's own greedy token: 0 for any lossless rule, and never less.
    temperature > 0: Σ (−log p(x) − H(p)), p under temperature and top-k: an excess of surprisal, not a KL. Its mean is
    KL(e‖p) + H(e) − H(p) for the emitted distribution e, which is unknown for most rules. It is 0 in expectation for a
    lossless rule, and below 0 for one that prefers likely tokens more than the target does.
    """
    before = [decoder_start(base)] if base.config.is_encoder_decoder else list(prompt)
    row = torch.tensor([[*before, *text]], device=base.device)
    inputs = {"input_ids": row}
    if base.config.is_encoder_decoder:
        inputs = {"input_ids": torch.tensor([list(prompt)], device=base.device), "decoder_input_ids": row}
    logits: Tensor = base(**inputs, use_cache=False).logits[0, len(before) - 1 : -1]
    nats = surprisal(logits.float(), row[0, len(before) :], temperature, top_k)
    inside = nats.isfinite()
    return float(nats[inside].double().sum()), int((~inside).sum())


def surprisal(logits: Tensor, x: Tensor, temperature: float, top_k: int) -> Tensor:
    """Each token's term of `distance` (T,), for tokens x (T,) under logits (T, V); infinite where p is 0."""
    x = x.unsqueeze(1)
    if not temperature:
        return (logits.max(-1, keepdim=True).values - logits.gather(1, x)).squeeze(1)
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    p = Sampler(processors, do_sample=True).probs(logits)
    return torch.xlogy(p, p).sum(-1) - p.gather(1, x).squeeze(1).log()


def costs_of(base: PreTrainedModel, cascade: Cascade, model: str) -> list[float] | None:
    """Cost of a pass of the target and of each draft, by a cost model; None if a draft is a head, of unknown cost.

    ValueError for a model that the published costs do not know."""
    if cascade.has_head:
        return None
    models = [base, *(getattr(draft, "small", None) for draft in cascade.drafts)]
    if model != "measured":
        return cost.published(model, [getattr(reviewer, "name_or_path", None) for reviewer in models])
    return cost.measured(models)
