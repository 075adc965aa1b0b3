"""A speculative server on a tiny model, right or wrong on purpose, that knows how far each token's distribution is from
the right one.

Each token is drafted by q, accepted with probability a(x), else drawn from r: so it follows q a + (1 - sum(q a)) r. A
fault changes one of these, or the context that the target sees. Shapes: B rows, V vocabulary.
"""

import torch

from specheads.audit.clients.client import Answer, Place
from specheads.audit.settings import process
from tests.support.tiny_models import near, tiny_llama

VOCABULARY = 24
FAULTS = (
    "residual", "q-for-p", "temperature", "late-top-p", "stale-keys", "positions",
    "after-rejection", "eos", "longer", "shorter", "repeat",
    "penalties", "ties", "some-greedy", "mixed-rows", "stop", "overrun", "logprobs",
)  # fmt: skip


def audit_base():
    return tiny_llama(
        vocab_size=VOCABULARY, num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.35,
    )  # fmt: skip


class Row:
    """One text. context, positions: what the target's cache holds; block: drafted tokens since the last rejection;
    places: of each token."""

    def __init__(self, prompt):
        self.prompt, self.tokens, self.block, self.done, self.logprobs = list(prompt), [], 0, False, []
        self.context, self.positions, self.shift = list(prompt), list(range(len(prompt))), 0
        self.rejected, self.places = False, []

    def append(self, token, stale=None):
        position = len(self.prompt) + len(self.tokens) + self.shift
        if stale is not None:
            self.context.append(stale)
            self.positions.append(position)
        self.context.append(token)
        self.positions.append(position)
        self.tokens.append(token)


class WrongServer:
    """fault: of FAULTS, or None for the right server; strength: a probability, for "temperature" a factor, for "ties"
    a gap of logits. distances: the total variation of each token written. says: the places of its tokens."""

    name = "a tiny server"

    def __init__(self, base, fault=None, strength=0.0, seed=0, noise=0.1, says=False):
        assert fault is None or fault in FAULTS, fault
        self.base, self.head = base, near(base, noise)
        self.fault, self.strength = fault, strength
        self.generator = torch.Generator().manual_seed(seed)
        self.distances, self.rejections, self.says = [], 0, says

    def share(self, fault):
        return self.strength if self.fault == fault else 0.0

    def happens(self, fault):
        return float(torch.rand((), generator=self.generator)) < self.share(fault)

    @torch.no_grad()
    def ask(self, prompts, settings):
        """A text of one token drafts nothing, as in real servers, which take it from the pass over the prompt."""
        if settings.max_tokens == 1 and self.fault is not None:
            return WrongServer(self.base).ask(prompts, settings)
        rows = [Row(prompt) for prompt in prompts]
        while active := [row for row in rows if not row.done]:
            self.step(active, settings)
        return [
            Answer(
                self.end(row.tokens, settings),
                logprobs=tuple(row.logprobs) if settings.logprobs else None,
                places=tuple(row.places) if self.says else None,
            )
            for row in rows
        ]

    def end(self, tokens, settings):
        if len(tokens) == settings.max_tokens:
            if self.happens("longer"):
                return [*tokens, tokens[-1]]
            if self.happens("shorter"):
                return tokens[:-1]
        if any(decode(tokens).endswith(stop) for stop in settings.stop) and self.happens("overrun"):
            return [*tokens, tokens[-1]]
        return tokens

    def step(self, rows, settings):
        """One token more for each row."""
        texts = [(row.prompt + row.tokens, range(len(row.prompt + row.tokens))) for row in rows]
        right = logits(self.base, texts)
        clean = all(row.context == text for row, (text, _) in zip(rows, texts, strict=True)) and not any(
            row.shift for row in rows
        )
        target = right if clean else logits(self.base, [(row.context, row.positions) for row in rows])
        p_right = self.probs(right, rows, settings)
        p = self.probs(target, rows, settings, late=self.fault == "penalties")
        drafting = logits(self.head, texts)
        q = self.probs(drafting, rows, settings)
        if self.fault == "temperature":
            p = (p.log() / self.strength).softmax(-1)
        accept = (p / q).clamp(max=1).nan_to_num(0)
        replacement = (p - q).clamp(min=0)
        if self.fault == "late-top-p":
            free = p_uncut(right, settings)
            q = p_uncut(drafting, settings)
            accept = (1 - self.strength) * (p / q).clamp(max=1) + self.strength * (free / q).clamp(max=1)
            replacement = (p - accept * q).clamp(min=0)
        replacement = torch.where(replacement.sum(-1, keepdim=True) > 1e-9, replacement, p)
        replacement = replacement / replacement.sum(-1, keepdim=True)
        s = self.share("residual")
        replacement = (1 - s) * replacement + s * p
        accept = accept + self.share("q-for-p") * (1 - accept)
        drafts, others = (torch.multinomial(x, 1, generator=self.generator).squeeze(-1) for x in (q, replacement))
        accepted = torch.rand(len(rows), generator=self.generator) < accept.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
        written = torch.where(accepted, drafts, others)
        law = q * accept + (1 - (q * accept).sum(-1, keepdim=True)) * replacement
        for fault, other in (
            ("some-greedy", torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).float()),
            ("repeat", torch.nn.functional.one_hot(torch.tensor([text[-1] for text, _ in texts]), p.shape[-1]).float()),
            ("mixed-rows", p.roll(1, 0)),
            ("after-rejection", torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).float()),
        ):
            if (s := self.share(fault)) > 0:
                if fault == "after-rejection":
                    s = s * torch.tensor([row.rejected for row in rows])
                instead = torch.rand(len(rows), generator=self.generator) < s
                written = torch.where(
                    instead, torch.multinomial(other, 1, generator=self.generator).squeeze(-1), written
                )
                s = torch.as_tensor(s).unsqueeze(-1)
                law = (1 - s) * law + s * other
        self.distances += ((law - p_right).abs().sum(-1) / 2).tolist()
        for b, (row, token, draft, drafted) in enumerate(
            zip(rows, written.tolist(), drafts.tolist(), accepted.tolist(), strict=True)
        ):
            told = drafting if drafted and settings.logprobs and self.happens("logprobs") else right
            row.logprobs.append(float(told[b].log_softmax(-1)[token]))
            self.write(row, token, draft, drafted, settings)

    def write(self, row, token, draft, drafted, settings):
        stale = None
        if not drafted:
            self.rejections += 1
            stale = draft if self.happens("stale-keys") else None
        row.append(token, stale)
        row.places.append(Place.AFTER_REJECTION if row.rejected else None)
        row.rejected = not drafted
        if not drafted and self.happens("positions"):
            row.shift += 1
        row.block = row.block + 1 if drafted else 0
        ends = token in settings.eos and not (drafted and self.happens("eos"))
        for stop in settings.stop:
            found = decode(row.tokens).endswith(stop)
            ends = ends or (found and not (drafted and self.happens("stop")))
        row.done = ends or len(row.tokens) >= settings.max_tokens

    def probs(self, scores, rows, settings, late=False):
        """(B, V) p. late: penalties do not see the tokens drafted since the last rejection."""
        processed = []
        for score, row in zip(scores, rows, strict=True):
            tokens = row.tokens
            if late and row.block and float(torch.rand((), generator=self.generator)) < self.strength:
                tokens = tokens[: len(tokens) - row.block]
            processed.append(process(score.unsqueeze(0), row.prompt + tokens, [0], settings, len(tokens))[0])
        processed = torch.stack(processed)
        if not settings.greedy:
            return processed.softmax(-1)
        best = processed >= processed.amax(-1, keepdim=True) - self.share("ties")
        return best / best.sum(-1, keepdim=True)


def decode(tokens, skip_special_tokens=True):
    """Letters: token 0 is "a"."""
    return "".join(chr(97 + token) for token in tokens)


def p_uncut(scores, settings):
    return (scores / settings.temperature).softmax(-1)


def logits(model, texts):
    """(B, V) after each text, a pair of ids and positions."""
    width = max(len(ids) for ids, _ in texts)
    ids, positions, mask = ([[*part, *[0] * (width - len(part))] for part in parts] for parts in zip(
        *((ids, list(positions), [1] * len(ids)) for ids, positions in texts), strict=True
    ))  # fmt: skip
    out = model(
        torch.tensor(ids), attention_mask=torch.tensor(mask), position_ids=torch.tensor(positions), use_cache=False
    ).logits
    return out[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text, _ in texts])].float()
