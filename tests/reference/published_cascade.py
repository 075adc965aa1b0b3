"""CS Drafting as published, simulated directly: whole forwards, no cache, one row, a recorded text for the target."""

from dataclasses import dataclass, field

import torch


@dataclass
class Published:
    """_csd_iteration over models, largest first, and last copy(ids) → 10 ids or fewer; copy is None for no copying.

    Two differences from the published code. The q of each token is that of the draft that wrote it or was the last to
    accept it, where that code passes on the last stage's alone. A smallest model without n-grams writes one token at a
    time.
    """

    models: list
    copy: object
    k_matrix: list
    leniency: float
    record: list  # the target's text
    reviews: list = field(default_factory=list)  # the target's, then each model's
    fed: list = field(default_factory=list)  # ids each model has to read if it caches what it has read
    cached_probs: dict = field(default_factory=dict)

    def __post_init__(self):
        self.reviews, self.fed = [0] * (len(self.models) + 1), [0] * len(self.models)
        self.known = [self.record[:0] for _ in self.models]

    @torch.no_grad()
    def probs(self, model, ids):
        """(len(ids), V) the model's probabilities after each id."""
        key = (model, *ids)
        if key not in self.cached_probs:
            self.cached_probs[key] = (
                self.models[model](torch.tensor([ids]), use_cache=False).logits[0].float().softmax(-1)
            )
        return self.cached_probs[key]

    def generate(self, prompt_length, until):
        """The text and the proposals until there are `until` ids. The first new token is the target's."""
        ids, proposals = self.record[: prompt_length + 1], []
        self.reviews[0] += 1
        self.known = [ids[:-1] for _ in self.models]
        while len(ids) < until:
            drafted, _ = self.iteration(0, ids, [])
            proposals.append(drafted[len(ids) :])
            self.reviews[0] += 1
            length = len(ids)
            while length < len(drafted) and drafted[length] == self.record[length]:
                length += 1
            ids = self.record[: length + 1]
        return ids, proposals

    def iteration(self, reviewer, ids, q):
        """What drafts below `reviewer` write after ids, of which the last len(q) are drafted, with probabilities q."""
        ks, start = self.k_matrix[reviewer] if reviewer < len(self.k_matrix) else [], len(ids)
        for column in range(reviewer, len(ks)):
            while len(ids) - start < sum(ks[: column + 1]):
                if column == len(self.models):
                    path = self.copy(ids)
                    ids, q = ids + path, q + [1.0] * len(path)
                    if len(path) < 10:
                        break
                else:
                    ids, q = self.reviewed(column, ids, q)
        return ids, q

    def reviewed(self, model, before, q_before):
        """One review by a model of the tokens that smaller drafts write."""
        ids, q = self.iteration(model + 1, before, q_before)
        self.reviews[model + 1] += 1
        shared = sum(1 for _ in self.common(self.known[model], ids))
        self.fed[model] += len(ids) - shared
        probs = self.probs(model, ids)
        accepted, accepted_q = list(before), list(q_before)
        for index in range(len(before), len(ids)):
            p, x = probs[index - 1], ids[index]
            accept = x == int(p.argmax()) or (
                self.leniency > 1 and float(p[x]) > q[index - len(before) + len(q_before)] / self.leniency
            )
            if not accept:
                break
            accepted.append(x)
            accepted_q.append(float(p[x]))
        self.known[model] = list(accepted)
        p = probs[len(accepted) - 1]
        return [*accepted, int(p.argmax())], [*accepted_q, float(p.max())]

    @staticmethod
    def common(one, other):
        for a, b in zip(one, other, strict=False):
            if a != b:
                return
            yield a
