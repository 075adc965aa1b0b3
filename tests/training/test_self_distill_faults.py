"""Rows from servers that fail: a passing fault changes nothing, a lasting one ends the run in one line."""
# ruff: noqa: F401, F811 (the fixtures of tests/support/distill_from_server.py)

import os
import random
import re
import resource
import signal
import threading
import time

import pytest

from specheads.training.self_distill import served
from tests.support.chat_base import messages
from tests.support.distill_from_server import ask, echo, folder, left_out, prompts, quick
from tests.support.killable_fork import fork
from tests.support.openai_server import DROP, serving


@pytest.mark.sampled(2)
@pytest.mark.parametrize("concurrency", [8, 1])
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


def test_answers_are_not_held_up_by_a_slow_one_and_are_written_in_order(ask, tmp_path, monkeypatch):
    rows = [{"messages": messages(("user", f"{i}?"))} for i in range(40)]
    with serving(echo) as url:
        ask(rows, "--server", url, "--concurrency", 1, output="calm.jsonl")
    lock, running, most, answered, first = threading.Lock(), 0, 0, 0, threading.Event()

    def slow_at_first(route, body, headers):
        """The first request is answered when thirty others have been."""
        nonlocal running, most, answered
        with lock:
            slow = not most
            running += 1
            most = max(most, running)
        assert not slow or first.wait(60)
        reply = echo(route, body, headers)
        with lock:
            running, answered = running - 1, answered + 1
            if answered == 30:
                first.set()
        return reply

    with serving(slow_at_first) as url:
        assert ask(rows, "--server", url, "--concurrency", 4)[0] == 0
    assert first.is_set() and 1 < most <= 4
    assert (tmp_path / "own.jsonl").read_bytes() == (tmp_path / "calm.jsonl").read_bytes()


def test_no_more_questions_are_asked_ahead_than_the_limit(ask, monkeypatch):
    monkeypatch.setattr(served, "AHEAD", 8)
    lock, asked, others = threading.Lock(), [], threading.Event()

    def slow_at_first(route, body, headers):
        with lock:
            asked.append(body)
            slow = len(asked) == 1
        if slow:
            time.sleep(0.5)
            with lock:
                others.behind = len(asked) - 1
        return echo(route, body, headers)

    with serving(slow_at_first) as url:
        ask([{"messages": messages(("user", f"{i}?"))} for i in range(30)], "--server", url, "--concurrency", 2)
    # Of two that run at once the second may arrive first: then one more than with it is asked behind it.
    assert 1 < others.behind <= 8 and len(asked) == 30


@pytest.mark.sampled(3)
@pytest.mark.parametrize("end", [DROP, (500, "oh no"), (200, "<html>"), (401, "no key"), (404, "no model m"), "hangs"])
def test_a_server_that_stays_away_ends_the_run_in_one_line_and_the_same_file_resumes(end, ask, tmp_path):
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
    own = [line for line in err.splitlines() if line.startswith("specheads: ")]
    assert code == 2 and len(own) == 1 and "Traceback" not in err
    permanent = isinstance(end, tuple) and end[0] in (401, 404)
    assert len(refused) == (1 if permanent else 3)
    assert end[1] in own[0] if permanent else "start again with the same options to resume" in own[0]
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
        assert len(ask(texts, "--chat", "--server", one, "--server", two, "--retries", 0)[1]) == 12
        assert seen == {"one": 6, "two": 6, "broken": 0}
        assert len(ask(texts, "--chat", "--server", one, "--server", bad, "--retries", 1, output="b.jsonl")[1]) == 12
        assert seen == {"one": 18, "two": 6, "broken": 6}


# --- resuming ---


@pytest.mark.sampled(3)
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


def test_a_full_disk_is_an_error_in_one_line_and_the_file_resumes(ask, tmp_path):
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
            r"^specheads: .*own.jsonl(.ahead)?: File too large; rows written so far are safe", err, re.M
        )
        assert calm.startswith((tmp_path / "own.jsonl").read_bytes() if (tmp_path / "own.jsonl").exists() else b"")
        assert ask(rows, "--chat", "--server", url)[0] == 0
    assert (tmp_path / "own.jsonl").read_bytes() == calm
