"""The distribution of a base small enough to enumerate: its own next-token distributions, by fresh passes."""

import torch

from tests.support.tiny_models import tiny_llama


def small_base(vocab_size):
    """A float64 Llama of two layers over a vocabulary that can be enumerated."""
    return tiny_llama(
        vocab_size=vocab_size, num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.6,
    ).double()  # fmt: skip


class BaseProbs:
    """The base's own next-token distribution, by a fresh pass over each prefix."""

    def __init__(self, base, change=lambda logits: logits):
        self.base, self.change, self.known = base, change, {}

    @torch.no_grad()
    def __call__(self, prefix):
        if prefix not in self.known:
            logits = self.base(torch.tensor([prefix])).logits[0, -1]
            self.known[prefix] = self.change(logits).softmax(-1).tolist()
        return self.known[prefix]

    def joint(self, prompt, length):
        """{the next `length` tokens: probability}."""
        probs = {(): 1.0}
        for _ in range(length):
            probs = {
                (*tokens, token): chance * p
                for tokens, chance in probs.items()
                for token, p in enumerate(self((*prompt, *tokens)))
                if p
            }
        return probs

    def extend_outcomes(self, probs, prompt, length):
        """Output of differing lengths, each continued by the base's own distribution."""
        whole = {}
        for tokens, chance in probs.items():
            for rest, p in self.joint((*prompt, *tokens), length - len(tokens)).items():
                whole[tokens + rest] = whole.get(tokens + rest, 0.0) + chance * p
        return whole
