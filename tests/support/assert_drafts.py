"""What a head drafts in real decoding, against the forward of the program it comes from or goes to."""

import torch

from specheads import chain

IDS = torch.tensor([[5, 17, 3, 88, 41, 9, 60, 12, 33]])


class Recorded:
    """A chain that keeps what the head scored: one list of (token scored after, logits, target ids) a draft."""

    def __init__(self, depth):
        self.chain, self.drafts = chain(depth), []

    def __getattr__(self, name):
        return getattr(self.chain, name)

    def grow(self, root, expand, sampler, vocab_size):
        levels = []

        def kept(tokens, parents):
            scored = expand(tokens, parents)
            levels.append((int(tokens[0, 0]), scored.logits[0, 0], scored.ids))
            return scored

        self.drafts.append(levels)
        return self.chain.grow(root, kept, sampler, vocab_size)


@torch.no_grad()
def states(base, ids):
    """ids (T,) → the base's hidden_states, each (T, H)."""
    return [h[0] for h in base(ids.unsqueeze(0), output_hidden_states=True).hidden_states]


def embeddings(base):
    return base.get_input_embeddings().weight.detach()


@torch.no_grad()
def assert_drafts(model, forward, target_ids=None):
    """In two steps of real decoding, a chain of 3: forward(states, tokens, drafted) → logits
    (Vd,) of each of its nodes."""
    plan = Recorded(3)
    out = model.generate(IDS, tree=plan, max_new_tokens=8, do_sample=False)[0]
    start = IDS.shape[1]
    for levels in plan.drafts[:2]:
        drafted = [token for token, _, _ in levels[1:]]
        wanted = forward(states(model.base, out[:start]), out[: start + 1], drafted)
        assert levels[0][0] == out[start]
        for (_, logits, ids), own in zip(levels, wanted, strict=True):
            can = own > -torch.inf  # a selector drafts no other tokens
            assert logits.shape == own.shape and torch.equal(logits > -torch.inf, can) and own[can].abs().max() > 0.1
            torch.testing.assert_close(logits[can], own[can], rtol=0, atol=1e-5 * max(1.0, float(own[can].abs().max())))
            assert (ids is None) == (target_ids is None) and (ids is None or torch.equal(ids, target_ids))
        following = levels[-1][2]
        last = levels[-1][1].argmax()
        drafted.append(int(last if following is None else following[last]))
        start += 1 + next(
            i for i, pair in enumerate(zip([*drafted, -1], out[start + 1 :], strict=False)) if pair[0] != pair[1]
        )
