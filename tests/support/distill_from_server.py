"""Distilling from a server in the tests' own process: the command on rows, and what it wrote."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.cli import program as cli
from specheads.training.self_distill import served
from tests.support.chat_base import save_base, write
from tests.support.openai_server import chat

NEW = 12
CHATS = [
    [("system", "be short"), ("user", "hi"), ("assistant", "HELLO"), ("user", "and now?")],
    [("user", "look it up"), ("assistant", "CALL"), ("tool", "42"), ("user", "so?")],
    [("user", "one")],
]
# As Qwen's: the reasoning in marks in front of the answer, and calls in marks after it
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content | trim }}]\n{% endif %}"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch, cache_in_tmp):
    monkeypatch.setattr(served, "FIRST_DELAY", 0.01)
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
    """Run the command in this process on rows: exit code, lines and standard error."""

    def run(rows, *options, output="own.jsonl", base=folder):
        source, out = write(tmp_path / f"rows-{len(str(rows))}.jsonl", rows), tmp_path / output
        known = ("--base", base, "--source", source, "--output", out, "--max_new_tokens", NEW, "--max_length", 200)
        code = cli.run(["distill", *map(str, (*known, *options))])
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
