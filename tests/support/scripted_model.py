"""A model whose drafts agree with a text for as many tokens as a script says."""

from types import SimpleNamespace

import torch

WRONG = 1


class Scripted:
    """text (1, T): what its base says; agreeing: of each draft's tokens, how many are the text's. asked: the lengths it
    was asked to draft after."""

    def __init__(self, text, agreeing):
        self.text, self.agreeing, self.asked, self.device = text, iter(agreeing), [], text.device

    def eval(self):
        return self

    def _after(self, begin, count):
        follows = torch.cat([self.text, torch.full((1, 99), WRONG + 1)], 1)
        return follows[:, begin : begin + count]

    def pseudo_speculative_generate(self, input_ids, steps=1):
        length = input_ids.shape[1]
        self.asked.append(length)
        draft = self._after(length + 1, steps).clone()
        draft[:, next(self.agreeing) :] = WRONG
        return self._after(length, 1), draft

    def __call__(self, input_ids, use_cache):
        return SimpleNamespace(logits=torch.nn.functional.one_hot(self._after(1, input_ids.shape[1]), 120).float())
