"""A random target and draft model, and greedy speculative decoding with them by uncached forwards, token by token."""

import torch

from tests.support.tiny_models import near, tiny_llama

PROMPT = [27, 42, 22, 85, 13, 36]
NEW = 24


def make_target():
    """A random model whose `plain` is its greedy text after PROMPT. Its generation config sets options that the
    reference functions ignore."""
    model = tiny_llama(num_hidden_layers=3)
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    model.plain = plain[0, len(PROMPT) :].tolist()
    model.generation_config.update(repetition_penalty=1.9, do_sample=True, top_k=3, no_repeat_ngram_size=2)
    return model


def make_draft_model():
    return near(tiny_llama(num_hidden_layers=3))


@torch.no_grad()
def likeliest(model, ids):
    return int(model(torch.tensor([ids])).logits[0, -1].argmax())


def replayed(target, draft, gamma, length, ends=()):
    """(new ids, accepted, drafted). draft(ids, count) → ids.

    A draft leaves room for the target's own token, as in the reference. All tokens of a draft with an end token count,
    though the text ends there.
    """
    ids, accepted, drafted = [*PROMPT, likeliest(target, PROMPT)], 0, 0
    while (room := len(PROMPT) + length - len(ids)) > 0 and not set(ids[len(PROMPT) :]) & set(ends):
        tokens = draft(ids, min(gamma, room - 1))
        drafted += len(tokens)
        for token in [*tokens, None]:
            ids.append(likeliest(target, ids))
            if ids[-1] != token:
                break
            accepted += 1
    new = ids[len(PROMPT) :]
    return new[: next((i + 1 for i, token in enumerate(new) if token in ends), len(new))], accepted, drafted


def greedy_draft(small):
    def draft(ids, count):
        ids = list(ids)
        for _ in range(count):
            ids.append(likeliest(small, ids))
        return ids[len(ids) - count :] if count else []

    return draft
