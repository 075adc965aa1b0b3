"""How far a text is from the target's distribution, measured from the text alone, so alike for every rule.

p is the target's distribution. Shapes: T generated tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.verify.seq2seq import decoder_start


@dataclass(frozen=True)
class Distance:
    """Sums over tokens. nats: the tokens' distances. outside: number of tokens with p = 0, left out of nats. tokens:
    number of all tokens."""

    nats: float = 0.0
    outside: int = 0
    tokens: int = 0

    def __add__(self, other: Distance) -> Distance:
        return Distance(self.nats + other.nats, self.outside + other.outside, self.tokens + other.tokens)

    @property
    def mean(self) -> float | None:
        """Nats per token, over tokens with p > 0; None if there are none."""
        inside = self.tokens - self.outside
        return self.nats / inside if inside else None


@torch.inference_mode()
def distance(
    base: PreTrainedModel, prompts: Sequence[list[int]], texts: Sequence[list[int]], temperature: float = 0.0,
    top_k: int = 0,
) -> Distance:  # fmt: skip
    """How far the texts generated after the prompts are from the target's distribution, in one pass over all of them.

    temperature 0: Σ log(max p / p(x)), p at temperature 1. Greedy text is a point mass at each token; its KL from p is
    −log p(x). This is that KL minus the KL of the target's own greedy token: 0 for any lossless rule, and never less.
    temperature > 0: Σ (−log p(x) − H(p)), p under temperature and top-k: an excess of surprisal, not a KL. Its mean is
    KL(e‖p) + H(e) − H(p) for the emitted distribution e, which is unknown for most rules. It is 0 in expectation for a
    lossless rule, and below 0 for one that prefers likely tokens more than the target does.
    """
    before = [[decoder_start(base)] for _ in prompts] if base.config.is_encoder_decoder else prompts
    rows, _ = _padded([[*p, *x] for p, x in zip(before, texts, strict=True)], base.device)
    if base.config.is_encoder_decoder:
        source, mask = _padded(prompts, base.device)
        given = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": rows}
    else:
        given = {"input_ids": rows}
    logits: Tensor = base(**given, use_cache=False).logits
    total = Distance()
    for row, prompt, text in zip(logits, before, texts, strict=True):
        following = row[len(prompt) - 1 : len(prompt) + len(text) - 1].float()
        nats = surprisal(following, torch.tensor(text, device=row.device), temperature, top_k)
        inside = nats.isfinite()
        total += Distance(float(nats[inside].double().sum()), int((~inside).sum()), len(text))
    return total


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids → ids (B, T) and mask (B, T), padded on the right, where no real token attends to padding."""
    width = max(map(len, rows))
    ids = [[*row, *[0] * (width - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


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
