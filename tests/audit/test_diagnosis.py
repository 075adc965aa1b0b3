"""Claims about mistakes of the set-up: each is recognised by its signature, and drafting faults are not excused."""

import copy

import pytest
import torch

from specheads.audit.clients.client import Answer, InProcess
from specheads.audit.diagnosis import Mistake, diagnose
from specheads.audit.run import audit
from specheads.audit.scoring import Scorer
from specheads.audit.settings import Settings
from specheads.audit.verdict import Verdict
from specheads.audit.watch import AuditConfig
from tests.support.tiny_models import near, tiny_llama
from tests.support.wrong_server import WrongServer, audit_base

GREEDY, SAMPLED = Settings(0.0, max_tokens=24), Settings(max_tokens=24)
CONFIG = AuditConfig(max_tokens=3000, batch=12, tv=0.1)


@pytest.fixture(scope="module")
def base():
    return audit_base()


def prompts(count=60):
    return torch.randint(7, 24, (count, 6), generator=torch.Generator().manual_seed(0)).tolist()


class Tokenizer:
    """Letters: token 0 is "a". Its template puts tokens 3 and 4 around a prompt."""

    bos_token_id, chat_template = 1, "yes"

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(97 + token) for token in tokens)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "d" + messages[0]["content"] + "e"


class After(InProcess):
    """A server that makes another context of each prompt."""

    def __init__(self, base, change):
        super().__init__(base)
        self.change = change

    def ask(self, prompts, settings):
        return super().ask([self.change(prompt) for prompt in prompts], settings)


class Spelled(InProcess):
    """A server whose tokenizer has other letters: as it says itself."""

    def ask(self, prompts, settings):
        return [
            Answer(a.tokens, "".join(chr(65 + token) for token in a.tokens)) for a in super().ask(prompts, settings)
        ]


def quantised(base, bits=7):
    """Each row of each matrix rounded to 2 ** bits values."""
    served = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in served.parameters():
            if parameter.ndim == 2:
                scale = parameter.abs().amax(-1, keepdim=True).clamp_min(1e-9) / (2 ** (bits - 1) - 0.5)
                parameter.copy_((parameter / scale).round() * scale)
    return served


MISTAKES = {
    "wrong base": (lambda base: InProcess(tiny_base(5)), Mistake.BASE),
    "other tokenizer": (lambda base: Spelled(tiny_base(5)), Mistake.TOKENIZER),
    "other vocabulary": (lambda base: InProcess(tiny_base(6, vocab_size=40)), Mistake.TOKENIZER),
    "quantised": (lambda base: InProcess(quantised(base)), Mistake.QUANTISED),
    "chat template": (lambda base: After(base, lambda prompt: [3, *prompt, 4]), Mistake.CONTEXT),
    "BOS": (lambda base: After(base, lambda prompt: [1, *prompt]), Mistake.CONTEXT),
}


def tiny_base(seed, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 24, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.35}
    model = tiny_llama(**{**sizes, **heads, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.35)
    return model


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_set_up_is_named_instead_of_not_lossless(base, name):
    """The whole audit of greedy text, and what is made of sampled texts."""
    torch.manual_seed(0)
    make, mistake = MISTAKES[name]
    client = make(base)
    report = audit(Scorer(base), client, prompts(), [GREEDY, SAMPLED], CONFIG, tokenizer=Tokenizer())
    assert report.exit_code == 4 and report.verdict is Verdict.UNDECIDED and len(report.results) == 1, str(report)
    assert report.results[0].mistake.startswith(mistake) and mistake in str(report)
    answers = client.ask(prompts(12), SAMPLED)
    found = diagnose(client, Scorer(base), prompts(12), answers, SAMPLED, Tokenizer())
    assert found is not None and found.mistake is mistake, str(found)


@pytest.mark.parametrize(
    ("settings", "fault", "strength"),
    [(GREEDY, "ties", 0.5), (Settings(max_tokens=24), "q-for-p", 1.0), (SAMPLED, "stale-keys", 1.0)],
)
def test_a_fault_of_drafting_is_not_excused(base, settings, fault, strength):
    server = WrongServer(base, fault, strength, seed=1)
    answers = server.ask(prompts(12), settings)
    assert diagnose(server, Scorer(base), prompts(12), answers, settings, Tokenizer()) is None


def test_a_quantised_server_whose_drafting_is_wrong_is_not_excused(base):
    """Its own choice after the same text is another one."""

    class Wrong(InProcess):
        def ask(self, prompts, settings):
            if settings.max_tokens == 1:
                return super().ask(prompts, settings)
            return InProcess(near(base, 0.1)).ask(prompts, settings)

    report = audit(Scorer(base), Wrong(quantised(base)), prompts(), [GREEDY], CONFIG, tokenizer=Tokenizer())
    assert report.verdict is Verdict.NOT_LOSSLESS, str(report)
