"""Threads that share one base: each decodes the text that it decodes alone."""

import sys
import threading
import time

import pytest
import torch

import specheads
from specheads.decoding.compiled import compiled_steps, graphs
from tests.support.families import FAMILIES, RECURRENT, build
from tests.support.refilled import PROMPTS, head

THREADS, ROUNDS = 3, 4


@pytest.fixture(autouse=True)
def frequent_switches():
    """Threads take turns every 10 microseconds, so that what they could disturb they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["Llama", "Qwen3.5", "Jamba"])
@pytest.mark.parametrize("draft", ["lookup", "eagle3"])
def test_threads_that_share_a_base_decode_as_alone(name, draft):
    base = build(*(FAMILIES | RECURRENT)[name])
    attention = base.config._attn_implementation
    drafter = draft if draft == "lookup" else head(draft, base)
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, "draft": drafter}

    assert_threads_decode_as_alone(base, options)
    assert base.config._attn_implementation == attention


@pytest.mark.parametrize("name", ["Llama", "Qwen3.5"])
def test_threads_that_share_a_base_compile_a_step_once(name, monkeypatch):
    compiled = []

    def compile_slowly(function, *others):
        compiled.append(function)
        time.sleep(0.05)
        return function

    monkeypatch.setattr(graphs, "compile_without_guards", compile_slowly)
    base = build(*(FAMILIES | RECURRENT)[name])
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, "compile": "eager"}
    assert_threads_decode_as_alone(base, options)
    assert len(compiled) == len(compiled_steps(base, "eager")) == 1


def assert_threads_decode_as_alone(base, options):
    def text(prompt):
        return specheads.generate(base, torch.tensor([prompt]), **options)[0].tolist()

    found = [[] for _ in range(THREADS)]

    def decode(number):
        for i in range(ROUNDS):
            try:
                found[number].append(text(PROMPTS[(number + i) % 5]))
            except Exception as error:
                found[number].append(error)

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = [text(prompt) for prompt in PROMPTS[:5]]
    assert found == [[alone[(number + i) % 5] for i in range(ROUNDS)] for number in range(THREADS)]
