"""Rows from OpenAI-compatible servers: the same as this machine's, exact ids, faults, and going on."""

import json
import os
import random
import re
import resource
import signal
import threading
import time

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.self_distill import server
from tests.forked import fork
from tests.openai_server import DROP, chat, of_model, serving
from tests.small_chat import messages, save_base, write
from train import self_distill

NEW = 12
CHATS = [
    [("system", "be short"), ("user", "hi"), ("assistant", "HELLO"), ("user", "and now?")],
    [("user", "look it up"), ("assistant", "CALL"), ("tool", "42"), ("user", "so?")],
    [("user", "one")],
]
# As Qwen's: the reasoning in marks in front of the answer, and calls in marks behind it
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content | trim }}]\n{% endif %}"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch, cache_in_tmp):
    monkeypatch.setattr(server, "FIRST_DELAY", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its answers are ASCII, which text alone can say."""
    folder = save_base(tmp_path_factory.mktemp("base"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    spelt = {token: tokenizer.decode([token]) for token in range(2, len(tokenizer))}
    base.generation_config.suppress_tokens = [1, *(token for token, text in spelt.items() if not " " <= text <= "~")]
    base.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("thinking"), THINKING)


@pytest.fixture
def ask(folder, tmp_path, capsys):
    """Run the script in this process on rows: exit code, lines and standard error."""

    def run(rows, *options, output="own.jsonl", base=folder):
        source, out = write(tmp_path / f"rows-{len(str(rows))}.jsonl", rows), tmp_path / output
        known = ("--base", base, "--source", source, "--output", out, "--max_new_tokens", NEW, "--max_length", 200)
        code = self_distill.main([str(word) for word in (*known, *options)])
        lines = out.read_bytes().splitlines(keepends=True) if out.exists() else []
        return code, [json.loads(line) for line in lines if line.endswith(b"\n")], capsys.readouterr().err

    return run


def prompts(*texts):
    return [{"prompt": text} for text in texts]


def left_out(path):
    lines = (path / "own.jsonl.left_out").read_text("utf8").splitlines()
    return {record["answer"]: record["why"] for record in map(json.loads, lines)}


def spelt(row, tokenizer):
    """A row's prompt and answer as text."""
    start = next(i for i, label in enumerate(row["labels"]) if label != -100)
    assert row["labels"] == [-100] * start + row["input_ids"][start:]
    return tokenizer.decode(row["input_ids"][:start]), tokenizer.decode(row["input_ids"][start:])


def echo(route, body, headers):
    """The last message in capitals."""
    return chat(body["messages"][-1]["content"].upper())


# --- the same rows ---


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
    ]  # fmt: skip
    assert "left out 3 answers" in err


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
    assert code == 0 and "3 of 4 prompts are on the server not what" in err
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


def test_a_chat_ends_behind_a_call_that_the_data_has_no_result_of(ask, thinking, tmp_path):
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


# --- faults ---


@pytest.mark.parametrize("concurrency", [1, 8])
def test_faults_that_pass_change_nothing(concurrency, ask, tmp_path):
    rows = [{"messages": messages(("user", f"{i}?"), ("user", "so?"))} for i in range(12)]
    with serving(echo) as url:
        ask(rows, "--server", url, output="calm.jsonl")
    draw, lock, seen = random.Random(5), threading.Lock(), []
    faults = [
        DROP, (500, "oh"), (503, {"error": "busy"}), (429, "slow down", {"Retry-After": "0.02"}), (200, b"{\xff"),
        (200, {"choices": []}), (200, {"error": "x"}), (200, {"choices": [{"message": {"content": 3}}]}), (408, ""),
    ]  # fmt: skip

    def troubled(route, body, headers):
        with lock:
            fault = draw.choice(faults) if draw.random() < 0.5 else None
            seen.append(fault)
        time.sleep(draw.random() / 100)
        return fault or echo(route, body, headers)

    with serving(troubled) as url:
        code, _, err = ask(rows, "--server", url, "--concurrency", concurrency, "--retries", 30)
    assert code == 0 and len(seen) > 30 and "24 lines" in err
    assert (tmp_path / "own.jsonl").read_bytes() == (tmp_path / "calm.jsonl").read_bytes()


@pytest.mark.parametrize("end", [DROP, (500, "oh no"), (200, "<html>"), (401, "no key"), (404, "no model m"), "hangs"])
def test_a_server_that_stays_away_ends_the_run_in_one_line_and_the_same_file_goes_on(end, ask, tmp_path):
    rows = [{"messages": messages(("user", f"{i}?"), ("user", "so?"))} for i in range(8)]
    with serving(echo) as url:
        ask(rows, "--server", url, output="calm.jsonl")
    calm, answered, refused = (tmp_path / "calm.jsonl").read_bytes(), [], []
    released = threading.Event()

    def dying(route, body, headers):
        if len(answered) < 7:
            answered.append(body)
            return echo(route, body, headers)
        refused.append(body)
        if end == "hangs":
            released.wait(10)
            return DROP
        return end

    with serving(dying) as url:
        quick = ("--retries", 2, "--concurrency", 1, "--timeout", 0.3)
        code, _, err = ask(rows, "--server", url, *quick)
        released.set()
    own = [line for line in err.splitlines() if line.startswith("train/self_distill.py: ")]
    assert code == 2 and len(own) == 1 and "Traceback" not in err
    permanent = isinstance(end, tuple) and end[0] in (401, 404)
    assert len(refused) == (1 if permanent else 3)
    assert end[1] in own[0] if permanent else "start again with the same options to go on" in own[0]
    cut = (tmp_path / "own.jsonl").read_bytes()
    assert calm.startswith(cut) and cut.count(b"\n") == 6, "three questions had both their answers"
    with serving(echo) as url:
        assert ask(rows, "--server", url)[0] == 0
    assert (tmp_path / "own.jsonl").read_bytes() == calm


def test_a_question_the_server_refuses_is_left_out_and_a_server_that_refuses_all_ends_the_run(ask, tmp_path):
    rows = [{"messages": messages(("user", "long" if i == 2 else f"{i}?"), ("user", "so?"))} for i in range(20)]

    def reply(route, body, headers):
        too_long = body["messages"][0]["content"] == "long"
        return (400, {"error": "too long"}) if too_long else echo(route, body, headers)

    with serving(reply) as url:
        code, made, err = ask(rows, "--server", url)
    assert code == 0 and len(made) == 38 and "left out 2 answers" in err and "too long" in err
    assert len(left_out(tmp_path)) == 2
    with serving(lambda *request: (422, "unknown field")) as url:
        code, made, err = ask(rows, "--server", url, output="none.jsonl")
    assert code == 2 and not made and "16 questions in a row" in err and "unknown field" in err
    assert not (tmp_path / "none.jsonl.left_out").exists(), "so that they are asked again"
    with serving(lambda *request: (400, "unknown field")) as url:
        assert ask(rows[:3], "--server", url, output="none.jsonl")[0] == 2


def test_a_server_that_minds_return_token_ids_is_not_asked_for_them_again(ask):
    minded = []

    def reply(route, body, headers):
        if "return_token_ids" in body:
            minded.append(body)
            return 400, {"error": "Unrecognized request argument: return_token_ids"}
        return echo(route, body, headers)

    with serving(reply) as url:
        code, rows, _ = ask(prompts(*"abcdef"), "--chat", "--server", url, "--concurrency", 1, "--retries", 0)
    assert code == 0 and len(rows) == 6 and len(minded) == 1


def test_servers_take_turns_and_stand_in_for_one_another(ask):
    seen = {"one": 0, "two": 0, "broken": 0}

    def counted(name, reply=echo):
        def run(*request):
            seen[name] += 1
            return reply(*request)

        return run

    texts = prompts(*(f"{i}?" for i in range(12)))
    broken = counted("broken", lambda *request: (500, ""))
    with serving(counted("one")) as one, serving(counted("two")) as two, serving(broken) as bad:
        assert len(ask(texts, "--chat", "--server", one, two, "--retries", 0)[1]) == 12
        assert seen == {"one": 6, "two": 6, "broken": 0}
        assert len(ask(texts, "--chat", "--server", one, bad, "--retries", 1, output="b.jsonl")[1]) == 12
        assert seen == {"one": 18, "two": 6, "broken": 6}


# --- going on ---


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_and_started_again_makes_the_same_file(seed, ask, tmp_path):
    rows = [{"messages": messages(("user", f"{i % 13}?"), ("user", f"{i}"))} for i in range(30)]
    with serving(echo) as url:
        ask(rows, "--server", url)
    whole, out = (tmp_path / "own.jsonl").read_bytes(), tmp_path / "killed.jsonl"
    draw, killed = random.Random(seed), threading.Event()
    until = draw.uniform(0.05, 0.9) * len(whole)

    def slow(*request):
        time.sleep(0.003)
        if out.exists() and out.stat().st_size >= until:
            killed.wait()  # so that it cannot be done before
        return echo(*request)

    with serving(slow) as url:
        options = (rows, "--server", url, "--concurrency", 4)
        if (child := fork()) == 0:
            try:
                ask(*options, output="killed.jsonl")
            finally:
                os._exit(9)
        while not out.exists() or out.stat().st_size < until:
            time.sleep(draw.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        killed.set()
        assert whole.startswith(out.read_bytes()) and out.read_bytes() != whole
        assert ask(*options, output="killed.jsonl")[0] == 0
    assert out.read_bytes() == whole and whole.count(b"\n") == 13 + 30
    assert (tmp_path / "killed.jsonl.left_out").read_bytes() == (tmp_path / "own.jsonl.left_out").read_bytes()


def test_a_full_disk_is_an_error_in_one_line_and_the_file_goes_on(ask, tmp_path):
    rows = prompts(*(f"{i}?" for i in range(30)))
    with serving(echo) as url:
        ask(rows, "--chat", "--server", url, output="calm.jsonl")
        calm = (tmp_path / "calm.jsonl").read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(calm) // 2 + 7, limits[1]))
        try:
            code, _, err = ask(rows, "--chat", "--server", url)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, old)
        assert code == 2 and re.search(
            r"^train/self_distill.py: .*own.jsonl: File too large; what was written is kept", err, re.M
        )
        assert 0 < (tmp_path / "own.jsonl").stat().st_size <= len(calm) // 2 + 7
        assert ask(rows, "--chat", "--server", url)[0] == 0
    assert (tmp_path / "own.jsonl").read_bytes() == calm
