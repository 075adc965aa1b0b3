"""A drafter that knows the text it drafts for, in trees of any plan."""

import itertools

import torch

from specheads import StaticTree
from specheads.decoding.planner import ChildLogits
from tests.support.families import VOCAB


class KnowingDrafter:
    """Drafts the base's own continuation among wrong siblings, at a rank and to a depth that chance decides.

    texts: each row's prompt and greedy continuation. It also keeps the features it was given, row by row.
    """

    def __init__(self, texts, layers=()):
        self.texts, self.layers = texts, layers
        self.coin = torch.Generator().manual_seed(0)
        self.features = [[] for _ in texts]
        self.next_tokens = [[] for _ in texts]

    def default_plan(self, device, do_sample):
        return StaticTree(tuple(c for depth in range(1, 5) for c in itertools.product((0, 1), repeat=depth)))

    def propose(self, context, sampler, plan):
        for row, new in enumerate(context.new.tolist()):
            self.features[row].append(context.features[row, :new])
            self.next_tokens[row] += context.following[row, :new].tolist()
        ends = [len(history) for history in context.history]
        on_text = torch.ones(len(ends), 1, dtype=torch.bool)
        depth = 0

        def true_token(ahead):
            rows = [[*text, 0][min(end + ahead, len(text))] for text, end in zip(self.texts, ends, strict=True)]
            return torch.tensor(rows).unsqueeze(1)

        def expand(tokens, parents):
            nonlocal on_text, depth
            if parents is not None:
                on_text = on_text.gather(1, parents.cpu()) & (tokens.cpu() == true_token(depth - 1))
            batch, width = tokens.shape
            chance = torch.rand(batch, width, generator=self.coin)
            logits = torch.rand(batch, width, VOCAB, generator=self.coin)
            token = true_token(depth).expand(batch, width).unsqueeze(2)
            logits.scatter_(2, (token + 1) % VOCAB, torch.where(chance > 0.5, 3.0, -1.0).unsqueeze(2))
            logits.scatter_(2, token, torch.where(on_text & (chance > 0.15), 2.0, -1.0).unsqueeze(2))
            depth += 1
            return ChildLogits(logits.to(tokens.device))

        return plan.grow(context.root, expand, sampler, VOCAB)
