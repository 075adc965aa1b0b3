"""Why a server's text is not the base's where drafting is not the cause: another tokenizer, context or base, or a
quantised server.

Asked for one token after a text that it wrote, a server drafts nothing: that token is its own model's. Where those
tokens are not the base's either, two models were compared, which says nothing about drafting. Where they are, or where
they are not what the server wrote there itself, its decoding is at fault. Shapes: n tokens of a text, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import NormalDist
from typing import Any

import torch

from specheads.audit.checks import greedy_gaps
from specheads.audit.clients.client import Answer, Client
from specheads.audit.scoring import ForeignToken, ScoredText, Scorer
from specheads.audit.settings import Settings

PROBES, TEXTS = 48, 12  # so many tokens are asked for, each twice, after as many of the texts
ENOUGH_MISSES = 3  # of the base's argmax: a right server has none, by the margin
TRIED = 24  # probes in another context
AGREES = 0.9  # of the probes, with what explains them
QUANTISED = 0.15  # of all tokens; 4-bit weights miss some 5 %, another size of the same family 20 % and more
NOISE = [0.01 * 1.15**k for k in range(60)]  # standard deviations of a gap of two logits: 0.01 to 38


class Mistake(StrEnum):
    TOKENIZER = "another tokenizer"
    CONTEXT = "another context"
    QUANTISED = "a quantised server"
    BASE = "another base"


ADVICE = {
    Mistake.TOKENIZER: "audit it with --base the model that it serves",
    Mistake.CONTEXT: "ask by a route that takes prompts as they are, or give it prompts without the template",
    Mistake.QUANTISED: "audit it against its own weights, dequantised, or against the same server without drafts",
    Mistake.BASE: "audit it with --base the model that it serves: the same size, version and fine-tuning",
}


@dataclass(frozen=True)
class Diagnosis:
    """A mistake of the set-up, and what showed it."""

    mistake: Mistake
    words: str

    def __str__(self) -> str:
        return f"{self.mistake}, not drafting: {self.words}; {ADVICE[self.mistake]}"


@dataclass(frozen=True)
class Probe:
    """One token asked for after `index` tokens of a text. margin: how far the base's argmax is above its second;
    gap: how far above the server's token; written: what stands in the text."""

    text: int
    index: int
    margin: float
    gap: float
    token: int
    written: int
    missed: bool


def other_tokenizer(answers: Sequence[Answer], tokenizer: Any) -> Diagnosis | None:
    """By the server's own text of its tokens: most of the texts are not what the base's tokenizer makes of them."""
    pairs = [
        (answer.text, tokenizer.decode(answer.tokens, skip_special_tokens=True)) for answer in answers if answer.text
    ]
    differ = [(theirs, ours) for theirs, ours in pairs if _plain(ours) not in _plain(theirs)]
    if len(differ) * 2 <= len(pairs):
        return None
    theirs, ours = differ[0]
    return Diagnosis(Mistake.TOKENIZER, f"it writes {theirs[:30]!r} where the base's has {ours[:30]!r}")


def _plain(text: str) -> str:
    """Without what tokenizers of one vocabulary treat in several ways: spaces at the ends, half a character."""
    return text.strip().strip("\ufffd").strip()


def diagnose(
    client: Client, scorer: Scorer, prompts: Sequence[list[int]], answers: Sequence[Answer], settings: Settings,
    tokenizer: Any = None,
) -> Diagnosis | None:  # fmt: skip
    """The mistake that explains texts which are not the base's, or None if the server's decoding is at fault. Asks for
    at most 2 * PROBES tokens."""
    if tokenizer is not None and (found := other_tokenizer(answers, tokenizer)) is not None:
        return found
    asked = [(prompt, a.tokens) for prompt, a in zip(prompts, answers, strict=True) if a.tokens][-TEXTS:]
    neutral = Settings(0.0, max_tokens=1, eos=settings.eos)
    try:
        scored = [scorer.score(prompt, tokens, replace(neutral, max_tokens=len(tokens))) for prompt, tokens in asked]
    except ForeignToken as error:
        return Diagnosis(Mistake.TOKENIZER, str(error))
    own_choice = settings.greedy and not settings.penalised  # a right server's probes are its text
    places = [(i, j) for i, text in enumerate(scored) for j in _positions(text, own_choice)]
    probes, steady = _probe(client, neutral, asked, scored, places)
    missed = [probe for probe in probes if probe.missed]
    if len(missed) < ENOUGH_MISSES or steady < 0.5:
        return None
    words = f"asked for one token, without drafts, it misses the base's at {len(missed)} of {len(probes)} positions"
    for name, change in _contexts(tokenizer):
        if _explains(scorer, change, asked, probes):
            return Diagnosis(Mistake.CONTEXT, f"{words}, and none of them if the base reads the prompt {name}")
    if own_choice and sum(probe.token == probe.written for probe in probes) < AGREES * len(probes):
        return None
    rate = _written_rate(scored) if own_choice else _fitted_rate(probes, scored)
    mistake = Mistake.QUANTISED if rate <= QUANTISED else Mistake.BASE
    return Diagnosis(mistake, f"{words}, which is some {rate:.1%} of all tokens")


def _probe(
    client: Client, neutral: Settings, asked: Sequence[tuple[list[int], list[int]]], scored: Sequence[ScoredText],
    places: Sequence[tuple[int, int]],
) -> tuple[list[Probe], float]:  # fmt: skip
    """The probes whose answer is the same twice, and the share of these among the misses. places: text and index."""
    prefixes = [asked[i][0] + asked[i][1][:j] for i, j in places]
    batches = [prefixes[start : start + 8] for start in range(0, len(prefixes), 8)]
    first, second = ([a.tokens[:1] for batch in batches for a in client.ask(batch, neutral)] for _ in range(2))
    probes, misses, unsteady = [], 0, 0
    for (i, j), tokens, again in zip(places, first, second, strict=True):
        if not tokens:
            continue
        text, token = scored[i], tokens[0]
        if not 0 <= token < text.raw.shape[-1]:
            raise ForeignToken(f"token {token}: the base has {text.raw.shape[-1]}")
        row = text.raw[j]
        top = row.topk(2).values
        gap = float(row.max() - row[token])
        missed = gap > text.margin
        misses += missed
        if tokens != again:
            unsteady += missed
            continue
        probes.append(Probe(i, j, float(top[0] - top[1]), gap, token, int(text.tokens[j]), missed))
    return probes, 1 - unsteady / misses if misses else 1.0


def _positions(text: ScoredText, own_choice: bool) -> list[int]:
    """Two that are spread, and those where the base is least certain beyond rounding; before these, if the server chose
    each token by itself, those where it missed the base's."""
    margins = _margins(text)
    order = torch.where(margins > text.margin, margins, math.inf)
    if own_choice:
        order = torch.where(greedy_gaps(text.raw, text.tokens) > text.margin, -1.0, order)
    spread = [0, len(text.tokens) // 2]
    ranked = [j for j in order.argsort().tolist() if j not in spread]
    return sorted({*spread, *ranked[: PROBES // TEXTS - 2]})


def _contexts(tokenizer: Any) -> Iterator[tuple[str, Callable[[list[int]], list[int]]]]:
    """What else a server may make of the ids that it is sent, with words for it."""
    if tokenizer is None:
        return
    if (bos := tokenizer.bos_token_id) is not None:
        yield "with a BOS token in front", lambda ids: [bos, *ids]
        yield "without the BOS token in front", lambda ids: ids[1:] if ids[0] == bos and len(ids) > 1 else ids
    if getattr(tokenizer, "chat_template", None):

        def template(ids: list[int]) -> list[int]:
            message = {"role": "user", "content": tokenizer.decode(ids, skip_special_tokens=True)}
            text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        yield "in its chat template", template


def _explains(
    scorer: Scorer, change: Callable[[list[int]], list[int]], asked: Sequence[tuple[list[int], list[int]]],
    probes: Sequence[Probe],
) -> bool:  # fmt: skip
    """Whether the base writes the probes' tokens after the changed context, within rounding: of TRIED, misses first."""
    tried = sorted(probes, key=lambda probe: not probe.missed)[:TRIED]
    hits = 0
    for probe in tried:
        prompt, tokens = asked[probe.text]
        context = change(prefix := prompt + tokens[: probe.index])
        if context == prefix:
            return False
        text = scorer.score(context, [probe.token], Settings(0.0, max_tokens=1))
        hits += float(greedy_gaps(text.raw, text.tokens)) <= text.margin
    return hits >= AGREES * len(tried)


def _margins(text: ScoredText) -> torch.Tensor:
    """(n,) the base's argmax above its second."""
    top = text.raw.topk(2).values
    return top[:, 0] - top[:, 1]


def _written_rate(scored: Sequence[ScoredText]) -> float:
    """The share of the texts' tokens that are not the base's argmax."""
    misses = torch.cat([greedy_gaps(text.raw, text.tokens) > text.margin for text in scored])
    return float(misses.double().mean())


def _fitted_rate(probes: Sequence[Probe], scored: Sequence[ScoredText]) -> float:
    """The share of all tokens that the server's own model misses, by noise fitted to probes that were not chosen by
    their outcome: it misses where the base's argmax is m above its second with probability Φ(-m / s)."""
    phi = NormalDist().cdf

    def log_likelihood(s: float) -> float:
        chances = [min(max(phi(-probe.margin / s), 1e-9), 1 - 1e-9) for probe in probes]
        return sum(math.log(c if probe.missed else 1 - c) for c, probe in zip(chances, probes, strict=True))

    s = max(NOISE, key=log_likelihood)
    margins = torch.cat(list(map(_margins, scored))).tolist()
    return sum(phi(-m / s) for m in margins) / len(margins)
