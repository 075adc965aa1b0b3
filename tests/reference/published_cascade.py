"""CS Drafting as published, simulated directly: whole forwards, no cache, one row, a recorded text for the target."""

from dataclasses import dataclass, field

import torch


@dataclass
class Published:
    """_csd_iteration over models, largest first, and at the bottom copy(ids) → 10 ids or fewer, or None for none.

    Against the published code: each token is judged by the law of who wrote it or last let it stand, where that code
    hands over the last stage's alone; and a smallest model without n-grams writes one token at a time.
    """

    models: list
    copy: object
    k_matrix: list
    leniency: float
    record: list  # the target's own text
    reviews: list = field(default_factory=list)  # the target's, then each model's
    fed: list = field(default_factory=list)  # ids each model had to read, were it to keep what it has read
    laws: dict = field(default_factory=dict)

    def __post_init__(self):
        self.reviews, self.fed = [0] * (len(self.models) + 1), [0] * len(self.models)
        self.known = [self.record[:0] for _ in self.models]

    @torch.no_grad()
    def law(self, model, ids):
        """(len(ids), V) what the model expects behind each of ids."""
        key = (model, *ids)
        if key not in self.laws:
            self.laws[key] = self.models[model](torch.tensor([ids]), use_cache=False).logits[0].float().softmax(-1)
        return self.laws[key]

    def generate(self, prompt_length, until):
        """The proposals until so many ids are there; the prompt's first token is the target's."""
        ids, proposals = self.record[: prompt_length + 1], []
        self.reviews[0] += 1
        self.known = [ids[:-1] for _ in self.models]
        while len(ids) < until:
            drafted, _ = self.iteration(0, ids, [])
            proposals.append(drafted[len(ids) :])
            self.reviews[0] += 1
            at = len(ids)
            while at < len(drafted) and drafted[at] == self.record[at]:
                at += 1
            ids = self.record[: at + 1]
        return ids, proposals

    def iteration(self, reviewer, ids, q):
        """What the drafts below `reviewer` write behind ids, of which the last len(q) are drafted with chances q."""
        ks, start = self.k_matrix[reviewer] if reviewer < len(self.k_matrix) else [], len(ids)
        for column in range(reviewer, len(ks)):
            while len(ids) - start < sum(ks[: column + 1]):
                if column == len(self.models):
                    run = self.copy(ids)
                    ids, q = ids + run, q + [1.0] * len(run)
                    if len(run) < 10:
                        break
                else:
                    ids, q = self.reviewed(column, ids, q)
        return ids, q

    def reviewed(self, model, before, q_before):
        """One review by a model of what those below it write."""
        ids, q = self.iteration(model + 1, before, q_before)
        self.reviews[model + 1] += 1
        shared = sum(1 for _ in self.common(self.known[model], ids))
        self.fed[model] += len(ids) - shared
        law = self.law(model, ids)
        kept, chances = list(before), list(q_before)
        for place in range(len(before), len(ids)):
            p, x = law[place - 1], ids[place]
            stands = x == int(p.argmax()) or (
                self.leniency > 1 and float(p[x]) > q[place - len(before) + len(q_before)] / self.leniency
            )
            if not stands:
                break
            kept.append(x)
            chances.append(float(p[x]))
        self.known[model] = list(kept)
        p = law[len(kept) - 1]
        return [*kept, int(p.argmax())], [*chances, float(p.max())]

    @staticmethod
    def common(one, other):
        for a, b in zip(one, other, strict=False):
            if a != b:
                return
            yield a
