"""Rows from OpenAI-compatible servers: the same as this machine's, with exact ids."""
# ruff: noqa: F401, F811 (the fixtures of tests/support/distill_from_server.py)

import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.training import self_distill as self_distill_package
from tests.support.chat_base import messages
from tests.support.distill_from_server import CHATS, NEW, ask, folder, left_out, prompts, quick, spelt, thinking
from tests.support.openai_server import chat, of_model, serving

# --- the same rows ---


@pytest.mark.sampled(2)
@pytest.mark.parametrize("send_ids", [True, False])
@pytest.mark.parametrize("kind", ["messages", "prompt", "text"])
def test_a_server_of_the_same_model_gives_the_same_rows_as_this_machine(kind, send_ids, ask, folder):
    text = "".join(f"line {i} of a text\n" for i in range(20))
    rows, options = {
        "messages": ([{"messages": messages(*turns)} for turns in CHATS], ()),
        "prompt": (prompts("def f(", "x", "import os, sys\nprint(", "y" * 300), ()),
        "text": ([{"text": text}], ("--prompt_tokens", 10, "--num_rows", 6)),
    }[kind]
    _, here, _ = ask(rows, *options)
    reply = of_model(
        AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), send_ids=send_ids
    )
    with serving(reply) as url:
        code, there, err = ask(rows, *options, "--server", url, "--concurrency", 3, output="there.jsonl")
    assert code == 0 and there == here and len(here) == {"messages": 6, "prompt": 4, "text": 6}[kind]
    assert ("came as text alone" in err) != send_ids


def test_an_answers_text_becomes_the_ids_of_what_the_template_writes(ask, thinking, tmp_path):
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}]
    answers = {
        "plain": chat("  yes "),  # the template would trim it
        "cut": chat("yes and", "length"),
        "reasoning": chat("so", reasoning_content="if it\nis "),
        "vllm": chat("so", reasoning="if"),
        "call": chat(None, "tool_calls", tool_calls=calls),
        "stopped": chat("yes", stop_reason=45),
        "cut in its reasoning": chat(None, "length", reasoning_content="if"),
        "filtered": chat("no", "content_filter"),
        "empty": chat("", "length"),
        "no call": chat(None, "tool_calls", tool_calls=[None]),
    }
    answers["stopped"][1]["choices"][0]["stop_reason"] = 45
    with serving(lambda route, body, headers: answers[body["messages"][-1]["content"]]) as url:
        code, rows, err = ask(prompts(*answers), "--chat", "--server", url, base=thinking)
    tokenizer = AutoTokenizer.from_pretrained(thinking)
    assert code == 0
    assert dict(spelt(row, tokenizer) for row in rows) == {
        "<user>plain<assistant>": "  yes <|end|>",
        "<user>cut<assistant>": "yes and",
        "<user>reasoning<assistant>": "[if it\nis]\nso<|end|>",
        "<user>vllm<assistant>": "[if]\nso<|end|>",
        "<user>call<assistant>": '{"name": "look", "arguments": {"at": 1}}<|end|>',
        "<user>stopped<assistant>": "yes" + tokenizer.decode([45]),
    }
    assert sorted(why[:29] for why in left_out(tmp_path).values()) == [
        "the answer ended with finish_", "the answer is empty", "the answer was cut inside its",
        "tool_calls=[None]: expected a",
    ]  # fmt: skip
    assert "left out 4 answers" in err


def test_reasoning_that_the_template_drops_is_learnt_from_token_ids_alone(ask, folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def reply(route, body, headers):
        asked = body["messages"][-1]["content"]
        ids = tokenizer("[if]yes<|end|>")["input_ids"] if asked != "text" else None
        return chat("yes", reasoning_content="if", ids=ids[:-1] if asked == "bare" else ids)

    with serving(reply) as url:
        code, rows, _ = ask(prompts("ids", "bare", "text"), "--chat", "--server", url)
    assert code == 0
    assert dict(spelt(row, tokenizer) for row in rows) == {
        "<user>ids<assistant>": "[if]yes<|end|>", "<user>bare<assistant>": "[if]yes<|end|>",
    }  # fmt: skip
    assert "return_token_ids" in "".join(left_out(tmp_path).values())


def test_a_servers_own_prompt_and_spelling_are_kept_and_foreign_tokens_are_not(ask, folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def reply(route, body, headers):
        asked = body["messages"][-1]["content"]
        prompt = tokenizer(f"<today><user>{asked}<assistant>")["input_ids"]
        spelling = "no" if asked == "other" else "yes"
        return chat("yes", prompt_ids=[10**6] if asked == "large" else prompt,
                    ids=tokenizer(spelling)["input_ids"] + [0])  # fmt: skip

    with serving(reply) as url:
        code, rows, err = ask(prompts("a", "b", "other", "large"), "--chat", "--server", url)
    assert code == 0 and "3 of 4 prompts are rendered differently by the server" in err
    assert dict(spelt(row, tokenizer) for row in rows) == {
        "<today><user>a<assistant>": "yes<|end|>", "<today><user>b<assistant>": "yes<|end|>",
    }  # fmt: skip
    assert all("is --base the model that is served?" in why for why in left_out(tmp_path).values())


# --- what is sent ---


def test_requests_are_what_servers_expect(ask, thinking, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen = []

    def reply(route, body, headers):
        seen.append((route, body, headers["Authorization"]))
        return (
            chat("x") if route == "chat/completions" else (200, {"choices": [{"text": "x", "finish_reason": "stop"}]})
        )

    tool = {"name": "look", "parameters": {"type": "object"}}
    calls = [{"function": {"name": "look", "arguments": {"at": 1}}}, {"function": {"name": "look", "arguments": "{}"}}]
    turns = [*messages(("user", "u")), {"role": "assistant", "reasoning_content": "r", "tool_calls": calls},
             *messages(("tool", "1"), ("tool", "2"))]  # fmt: skip
    with serving(reply) as url:
        extra = (
            "--server",
            url + "/",
            "--model",
            "m",
            "--temperature",
            0.5,
            "--top_p",
            0.9,
            "--top_k",
            7,
            "--min_p",
            0.1,
        )
        extra += ("--extra_body", '{"max_tokens": null, "max_completion_tokens": 5, "stop": ["!"]}')
        extra += ("--chat_template_kwargs", '{"enable_thinking": false}')
        assert ask([{"messages": turns, "tools": [tool]}], *extra, base=thinking)[0] == 0
        assert ask(prompts("ab"), "--server", url, base=thinking, output="text.jsonl")[0] == 0
    (first, second, text) = seen
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1}
    fixed = {"model": "m", "max_completion_tokens": 5, "stop": ["!"], "return_token_ids": True, **sampling}
    assert first[0] == "chat/completions" and first[2] == "Bearer secret"
    seed = first[1].pop("seed")
    assert first[1] == {
        **fixed, "messages": messages(("user", "u")), "tools": [{"type": "function", "function": tool}],
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert 0 <= seed < 2**31 and second[1]["seed"] == seed
    sent = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "look", "arguments": text}}
        for i, text in enumerate(['{"at": 1}', "{}"])
    ]
    assert second[1]["messages"] == [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": sent},
        {"role": "tool", "content": "1", "tool_call_id": "call00000"},
        {"role": "tool", "content": "2", "tool_call_id": "call00001"},
    ]
    ids = AutoTokenizer.from_pretrained(thinking)("ab")["input_ids"]
    del text[1]["seed"]
    assert text[0] == "completions"
    assert text[1] == {
        "model": str(thinking),
        "prompt": ids,
        "max_tokens": NEW,
        "temperature": 0,
        "return_token_ids": True,
    }


def test_a_chat_ends_after_a_call_that_the_data_has_no_result_of(ask, thinking, tmp_path):
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]

    def reply(route, body, headers):
        called = body["messages"][-1]["content"] == "call"
        return chat(None, "tool_calls", tool_calls=calls) if called else chat("fine")

    plain = messages(("user", "call"), ("user", "and?"), ("user", "so?"))
    known = [*messages(("user", "call")), {"role": "assistant", "content": "", "tool_calls": calls},
             *messages(("tool", "7"), ("user", "and?"))]  # fmt: skip
    with serving(reply) as url:
        code, rows, _ = ask([{"messages": plain}, {"messages": known}], "--server", url, base=thinking)
    assert code == 0 and len(rows) == 1 + 3 - 1, "the two first lines are the same: it is there once"
    assert sorted(why[:24] for why in left_out(tmp_path).values()) == ["the answer before it cal"] * 2 + [
        "the same line is there a"
    ]


def test_a_missing_client_is_named_in_one_line(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.delitem(sys.modules, "specheads.training.self_distill.served", raising=False)
    monkeypatch.delattr(self_distill_package, "served", raising=False)
    code, rows, err = ask(prompts("a"), "--server", "http://localhost:1/v1")
    assert code == 2 and not rows and "Traceback" not in err
    assert "--server needs a package" in err and "pip install openai" in err
