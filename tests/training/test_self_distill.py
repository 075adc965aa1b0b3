"""Making rows of the base's own answers: what is asked, what is supervised, resuming, and what is refused."""

import json
import re
import shutil
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.bench.prompts import read_prompts
from specheads.cli import program as cli
from specheads.data import corpus
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets
from specheads.training.self_distill.questions import TextPrompt, passes, windows
from specheads.training.self_distill.rows_file import RowsFile
from tests.support.chat_base import TEMPLATE, messages, save_base, write
from tests.support.tiny_models import tiny_llama

NEW = 12
CHATS = [
    [("system", "be short"), ("user", "hi"), ("assistant", "HELLO"), ("user", "and now?")],
    [("user", "a rather long question, much longer than the others")],
    [("user", "one"), ("assistant", "ONE"), ("user", "two"), ("assistant", "TWO"), ("user", "three")],
    [("user", "look it up"), ("assistant", "CALL"), ("tool", "42"), ("assistant", "SO"), ("user", "so?")],
]
TURNS = 9  # of the user and of tools in CHATS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def make(folder, tmp_path, cache_in_tmp):
    """Run the command in this process on rows; its own rows come back."""

    def run(rows, *options, output="own.jsonl"):
        source, out = write(tmp_path / "rows.jsonl", rows), tmp_path / output
        known = ("--base", folder, "--source", source, "--output", out, "--max_new_tokens", NEW)
        assert cli.run(["distill", *map(str, (*known, *options))]) == 0
        return [json.loads(line) for line in out.read_text("utf8").splitlines()]

    return run


def greedy(loaded, prompt):
    """base.generate() on one prompt alone."""
    base, _ = loaded
    ids = torch.tensor([prompt])
    return base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[0].tolist()


def answered(row):
    """The prompt and the answer of a row, told apart by its labels alone."""
    start = next(i for i, label in enumerate(row["labels"]) if label != -100)
    assert row["labels"] == [-100] * start + row["input_ids"][start:]
    return row["input_ids"][:start], row["input_ids"][start:]


def by_prompt(rows):
    return sorted(rows, key=lambda row: row["input_ids"])


def test_every_turn_of_a_chat_gets_the_bases_own_answer_and_it_alone_is_supervised(make, loaded):
    base, tokenizer = loaded
    wanted = []
    for chat in CHATS:
        text = ""
        for i, (role, content) in enumerate(chat):
            if role == "assistant":
                continue
            text += f"<{role}>{content}"
            if role in ("user", "tool"):
                prompt = tokenizer(text + "<assistant>")["input_ids"]
                row = greedy(loaded, prompt)
                wanted.append({"input_ids": row, "labels": [-100] * len(prompt) + row[len(prompt) :]})
                answer = tokenizer.decode(row[len(prompt) :], skip_special_tokens=True)
                if chat[i + 2 : i + 3] == [("tool", "42")]:
                    answer = "CALL"  # whose result follows
                text += f"<assistant>{answer}<|end|>"
    made = make([{"messages": messages(*chat)} for chat in CHATS], "--batch_size", 3)
    assert len(made) == TURNS and by_prompt(made) == by_prompt(wanted)
    ended = [row["labels"][-1] in base.generation_config.eos_token_id for row in made]
    assert any(ended) and not all(ended)


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_answered_as_they_are_or_as_a_message_of_the_user(chat, make, loaded):
    texts = ["def f(", "x", "import os, sys\nprint("]
    made = make([{"prompt": text} for text in texts], *["--chat"] * chat)
    rendered = [f"<user>{text}<assistant>" if chat else text for text in texts]
    prompts = [loaded[1](text)["input_ids"] for text in rendered]
    assert sorted(answered(row)[0] for row in made) == sorted(prompts)
    for row in made:
        prompt, _ = answered(row)
        assert row["input_ids"] == greedy(loaded, prompt)


def test_text_is_continued_from_windows_and_supervised_from_their_start(make, loaded):
    text = "".join(f"line {i} of a text\n" for i in range(20))
    made = make([{"text": text}, {"text": "short"}], "--prompt_tokens", 10, "--num_rows", 5)
    assert len(made) == 5
    for row in made:
        window = loaded[1].decode(row["input_ids"][:10]).removesuffix("<|end|>")
        assert window in text and row["input_ids"] == greedy(loaded, row["input_ids"][:10])
        assert row["labels"] == [-100, *row["input_ids"][1:]]


def test_long_prompts_keep_their_end(make, loaded):
    (row,) = make([{"prompt": "abcdefghijklmnopqrstuvwxyz"}], "--max_length", NEW + 8)
    assert row["input_ids"] == greedy(loaded, loaded[1]("stuvwxyz")["input_ids"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cut", [0, 2, 3, "inside"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_run_that_was_stopped_makes_the_same_file(temperature, cut, make, tmp_path):
    """Also after a cut inside a line or between the two turns of a conversation."""
    rows = [{"messages": messages(("user", f"{i}?"), ("assistant", ""), ("user", "so?"))} for i in range(4)]
    ask = (rows, "--batch_size", 1, "--temperature", temperature, "--seed", 3)
    make(*ask)
    whole = (tmp_path / "own.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    left = b"".join(lines[:4]) + lines[4][:9] if cut == "inside" else b"".join(lines[:cut])
    (tmp_path / "cut.jsonl").write_bytes(left)
    shutil.copy(tmp_path / "own.jsonl.options", tmp_path / "cut.jsonl.options")
    make(*ask, output="cut.jsonl")
    assert (tmp_path / "cut.jsonl").read_bytes() == whole
    make(*ask, output="cut.jsonl")
    assert (tmp_path / "cut.jsonl").read_bytes() == whole
    assert make(*ask, "--num_rows", 3, output="three.jsonl") == [json.loads(line) for line in lines[:3]]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seed", 4, "seed: 3, not 4"), ("--temperature", 0.5, r"temperature: \[1.0\], not \[0.5\]"),
        ("--max_new_tokens", 3, "max_new_tokens"), ("--top_k", 5, "top_k: None, not 5"),
        ("--dtype", "bfloat16", "dtype: 'auto', not 'bfloat16'"),
    ],
)  # fmt: skip
def test_a_file_is_not_resumed_with_options_that_give_other_rows(option, value, message, make, tmp_path, capsys):
    rows = [{"prompt": f"{i}"} for i in range(6)]
    ask = ("--temperature", 1, "--seed", 3)
    make(rows, *ask, "--num_rows", 4)
    before = (tmp_path / "own.jsonl").read_bytes()
    with pytest.raises((AssertionError, SystemExit)):
        make(rows, *ask, option, value)
    assert re.search(rf"own\.jsonl was begun with other options \(.*{message}", (error := capsys.readouterr().err))
    assert "resume it with the same, or give another --output" in error
    assert (tmp_path / "own.jsonl").read_bytes() == before
    assert len(make(rows, *ask, "--batch_size", 2)) == 6  # which goes on


def test_a_file_is_not_resumed_with_other_questions_whose_order_is_another(make, tmp_path, capsys):
    rows = [{"prompt": f"{i}"} for i in range(6)]
    make(rows[:4], "--num_rows", 3)
    with pytest.raises((AssertionError, SystemExit)):
        make(rows)
    assert re.search(r"other options \(questions: '4, .*, not '6, .*give another --output", capsys.readouterr().err)


def test_sampled_answers_are_those_of_their_numbers_whatever_the_batches(make, tmp_path):
    """Greedy and sampled, over rounds of other sizes, and resumed with other batches."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 2
    rows = [{"prompt": "a"}, {"messages": turns}, {"prompt": "bb"}, {"prompt": "c d"}]
    ask = (rows, "--temperature", "0,1.5", "--dtype", "float32", "--seed", 3)
    whole = make(*ask, "--num_rows", 16, "--batch_size", 1)
    assert make(*ask, "--num_rows", 16, "--batch_size", 3, output="other.jsonl") == whole
    make(*ask, "--num_rows", 6, "--batch_size", 2, output="cut.jsonl")
    assert make(*ask, "--num_rows", 16, "--batch_size", 5, output="cut.jsonl") == whole


@pytest.mark.parametrize("content", [b'{"x": 1}\n{"x": 2}\nand a line without an end', b"no lines"])
def test_a_file_of_something_else_is_neither_gone_on_with_nor_touched(content, make, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_bytes(content)
    with pytest.raises((AssertionError, SystemExit)):
        make([{"prompt": "a"}, {"prompt": "b"}], "--num_rows", 2, output="prompts.jsonl")
    error = capsys.readouterr().err
    assert "prompts.jsonl is there already" in error and "prompts.jsonl.options beside them: give another" in error
    assert (tmp_path / "prompts.jsonl").read_bytes() == content


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_asked_once_before_any_is_asked_again_and_temperatures_share_each_pass(seed):
    rows, temperatures = [TextPrompt([i]) for i in range(6)], (0.0, 0.7, 0.7)
    asks = list(islice(passes(rows, seed, temperatures), 6 + 4 + 4))  # greedily each once
    drawn = [[one.question.ids[0] for one in asks[a:b]] for a, b in ((0, 6), (6, 12), (12, 14))]
    assert sorted(drawn[0]) == list(range(6)) and drawn[0] == [
        one.question.ids[0] for one in islice(passes(rows, seed), 6)
    ]
    assert [one.temperature for one in asks[:6]].count(0.7) == 4
    pairs = [(one.question.ids[0], one.temperature) for one in islice(passes(rows, seed, temperatures), 18)]
    assert sorted(pairs) == sorted([(i, t) for i in range(6) for t in temperatures])  # three passes, evenly
    more = list(islice(passes(rows, seed, temperatures), 18, 18 + 12))
    assert all(one.temperature == 0.7 for one in more), "nothing is greedily asked twice"
    assert len(list(passes(rows, seed))) == 6


def test_a_window_is_greedily_drawn_once_and_then_none_is_left():
    rows = [list(range(10)), list(range(20, 26))]
    drawn = [tuple(one.question.ids) for one in windows(rows, 4, 0)]
    assert sorted(drawn) == sorted(tuple(row[i : i + 4]) for row in rows for i in range(len(row) - 3))


def test_more_rows_than_turns_are_sampled_and_differ(make):
    rows = make([{"prompt": "a"}, {"prompt": "b"}], "--num_rows", 6, "--temperature", 2.0, "--batch_size", 2)
    prompts = [answered(row)[0] for row in rows]
    # Two answers of 12 tokens at temperature 2 are the same with a chance of well under 1e-6; the seed is fixed too.
    assert [prompts.count(p) for p in prompts] == [3] * 6 and len({str(row) for row in rows}) == 6


def test_a_mix_of_temperatures_is_greedy_on_its_share_and_resumes_as_it_would_have(make, loaded, tmp_path):
    rows = [{"prompt": f"{i} is"} for i in range(7)]
    ask = (rows, "--temperature", "0,1.5", "--top_k", 200, "--batch_size", 2, "--num_rows", 14, "--seed", 1)
    mixed = make(*ask)
    whole = (tmp_path / "own.jsonl").read_bytes()
    cold = [row == {**row, "input_ids": greedy(loaded, answered(row)[0])} for row in mixed]
    # Two passes: each question once greedily and once not; 12 sampled tokens are the greedy ones at well under 1e-6.
    assert sum(cold) == 7 and sum(cold[:7]) == 4
    assert len({str(answered(row)[0]) for row, is_cold in zip(mixed, cold, strict=True) if is_cold}) == 7
    (tmp_path / "cut.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:9])[:-5])
    shutil.copy(tmp_path / "own.jsonl.options", tmp_path / "cut.jsonl.options")
    make(*ask, output="cut.jsonl")
    assert (tmp_path / "cut.jsonl").read_bytes() == whole


def test_answers_that_were_ahead_of_their_turn_survive_a_kill(make, tmp_path, monkeypatch):
    turns = [2, 1, 1, 3, 1, 1]
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}] * num} for i, num in enumerate(turns)]
    ask = (rows, "--chat", "--batch_size", 2)
    make(*ask)
    whole, add, kept = (tmp_path / "own.jsonl").read_bytes(), RowsFile.add, []

    def killed(self, question, results):
        if self.ahead_path.exists():
            raise KeyboardInterrupt
        add(self, question, results)

    with monkeypatch.context() as patch:
        patch.setattr(RowsFile, "add", killed)
        with pytest.raises(AssertionError, match="130"):
            make(*ask, output="cut.jsonl")
    take = RowsFile.take_kept
    monkeypatch.setattr(RowsFile, "take_kept", lambda self, first: kept.append(take(self, first)) or kept[-1])
    make(*ask, output="cut.jsonl")
    assert (tmp_path / "cut.jsonl").read_bytes() == whole and any(kept)
    assert not (tmp_path / "cut.jsonl.ahead").exists()


def test_top_k_of_one_is_greedy(make):
    rows = [{"prompt": f"{i} is"} for i in range(3)]
    assert make(rows, "--temperature", 2, "--top_k", 1) == make(rows, output="greedy.jsonl")


def test_the_same_question_is_asked_once_and_no_line_is_written_twice(make, capsys, tmp_path):
    rows = [{"prompt": text} for text in ("a", "b", "a", "b", "b")]
    made = make(rows, "--temperature", 1, "--top_k", 1, "--num_rows", 9, "--batch_size", 1)
    assert len(made) == 2 and made[0] != made[1]
    err = capsys.readouterr().err
    assert "asked once: 3 of 5 rows" in err and "2 lines of the 9 asked for" in err and "same lines again" in err
    with pytest.raises(AssertionError):
        make(rows, "--num_rows", 3, output="more.jsonl")
    assert "has 2 turns" in capsys.readouterr().err
    chats = [{"messages": messages(("user", "u"), ("assistant", text), ("user", "v"))} for text in "xy"]
    assert len(make([*chats, {"messages": messages(("user", " u"), ("user", "v"))}], output="chats.jsonl")) == 2
    # Chats that begin alike: the line they share is there once
    chats = [{"messages": messages(("user", "u"), ("user", text))} for text in "vw"]
    assert len(make(chats, "--num_rows", 4, output="alike.jsonl")) == 3


def test_variables_and_tools_reach_the_template(tmp_path_factory, tmp_path, cache_in_tmp):
    template = "{% if thinking is false %}no{% endif %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    folder = save_base(tmp_path_factory.mktemp("base"), template + TEMPLATE)
    tools = [{"type": "function", "function": {"name": "look"}}]
    source = write(tmp_path / "rows.jsonl", [{"messages": messages(("user", "u")), "tools": tools}])
    words = ["--base", folder, "--source", source, "--output", tmp_path / "own.jsonl", "--max_new_tokens", 3]
    words += ["--chat_template_kwargs", '{"thinking": false}']
    assert cli.run(["distill", *map(str, words)]) == 0
    row = json.loads((tmp_path / "own.jsonl").read_text())
    assert AutoTokenizer.from_pretrained(folder).decode(answered(row)[0]) == "no[look]<user>u<assistant>"


def test_the_rows_go_through_build_datasets_unchanged(make, loaded, tmp_path):
    made = make([{"messages": messages(*chat)} for chat in CHATS])
    train, _ = build_datasets(DataConfig(train=str(tmp_path / "own.jsonl")), loaded[1])
    assert [{name: row[name] for name in ("input_ids", "labels")} for row in train] == made


def test_bench_asks_the_first_turn_of_the_same_files(loaded, tmp_path):
    rows = [{"messages": messages(*CHATS[0])}, {"prompt": "p"}, {"text": "t"}]
    path = write(tmp_path / "asked.jsonl", rows)
    chat, *texts = (prompt.asked for prompt in read_prompts(path))
    chats = [chat, *(prompt.asked for prompt in read_prompts(path, chat=True)[1:])]
    rendered = [loaded[1].decode(chat.prompt((), loaded[1])) for chat in chats]
    assert texts == ["p", "t"]
    assert rendered == ["<system>be short<user>hi<assistant>", "<user>p<assistant>", "<user>t<assistant>"]
    write(path, [{"messages": []}])
    with pytest.raises(ValueError, match="line 1: messages="):
        read_prompts(path)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{"prompt": ""}], "", "row 1"),
        ([{"prompt": None, "text": "b"}], "", "rows of text go into their own file"),
        ([{"messages": []}], "", "expected a list of"),
        ([{"messages": [{"content": "a"}]}], "", "'role'"),
        ([{"messages": [{"role": "user"}]}], "", "'content'"),
        ([{"messages": [{"role": "system", "content": "a"}]}], "", "none of the 1 rows"),
        ([{"messages": [{"role": "user", "content": "refuse"}]}], "", "not that"),
        ([{"other": "a"}], "", "'prompt'"),
        ([{"text": "a"}], "", "lower --prompt-tokens"),
        ([{"text": None}], "", "a row with columns ['text'] has text=None"),
        ([{"input_ids": [5, 257]}, {"input_ids": [5, 258]}], "", "row 2 of {tmp}/rows.jsonl: token 258 is outside"),
        ([{"input_ids": [5]}, {"input_ids": [-1]}], "", "row 2 of {tmp}/rows.jsonl: token -1 is outside"),
        ([{"text": "a"}], "--chat", "--chat"),
        ([{"prompt": "a"}], "--num_rows 2", "a greedy answer"),
        ([{"prompt": "a"}], "--num_rows 0", "--num-rows"),
        ([{"prompt": "a"}], "--num_rows many", "many"),
        ([{"prompt": "a"}], "--temperature -1", "--temperature -1 must"),
        ([{"prompt": "a"}], "--max_length 12 --max_new_tokens 12", "--max-length 12 must be above --max-new-tokens 12"),
        ([{"prompt": "a"}], "--max_length 9000 --max_new_tokens 600", "512 tokens"),
        ([{"prompt": "a"}], "--dtype int7", "int7"),
        ([{"prompt": "a"}], "--temperature 0,inf", "--temperature inf"),
        ([{"prompt": "a"}], "--top_p 0.9", "--top-p 0.9 changes nothing"),
        ([{"prompt": "a"}], "--temperature 1 --top_p 0", "--top-p 0.0"),
        ([{"prompt": "a"}], "--temperature 1 --top_k 0", "--top-k"),
        ([{"prompt": "a"}], "--temperature 1 --min_p 2", "--min-p 2.0"),
        ([{"prompt": "a"}], "--model m", "--model m is for a --server"),
        ([{"prompt": "a"}], "--server localhost:8000", "http://localhost:8000/v1"),
        ([{"prompt": "a"}], "--server http://localhost:port/v1", "http://localhost:8000/v1"),
        ([{"prompt": "a"}], "--server http://[::1/v1", "http://localhost:8000/v1"),
        ([{"prompt": "a"}], "--server http://localhost:1/v1 --retries 0", "no answer in 1 tries"),
        ([{"prompt": "a"}], "--server http://a --retries -1", "--retries -1"),
        ([{"prompt": "a"}], "--server http://a --timeout 0", "--timeout 0"),
        ([{"prompt": "a"}], "--server http://a --extra_body [1]", "--extra-body [1]"),
        ([{"prompt": "a"}], "--chat_template_kwargs {{", "is not JSON"),
        ([{"prompt": "a"}], "--split all", "unknown split 'all'"),
        ([{"prompt": "a"}], "--what 1", "--what"),
        ([{"prompt": "a"}], "--source {tmp}/absent.jsonl", "absent.jsonl"),
        ([{"prompt": "a"}], "--base {tmp}/nowhere", "nowhere"),
        (
            [{"prompt": "a"}],
            f"--base {corpus.checkpoints_dir()}/eagle3",
            "eagle3 is a draft head, not a",
        ),
        ([{"prompt": "a"}], "--output {tmp}", "is a folder: give a file"),
        ([{"prompt": "a"}], "--output {tmp}/rows.jsonl/own.jsonl", "is a file, and nothing can be written below it"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    rows, options, said, folder, tmp_path, capsys, cache_in_tmp, offline
):
    source = write(tmp_path / "rows.jsonl", rows)
    known = ["--base", folder, "--source", source, "--output", tmp_path / "own.jsonl"]
    code = cli.run(["distill", *map(str, known), *options.format(tmp=tmp_path).split()])
    out, err = capsys.readouterr()
    own = [line for line in err.splitlines() if line.startswith("specheads: ")]
    assert code == 2 and not out and "Traceback" not in err
    assert len(own) == 1 and said.replace("{tmp}", str(tmp_path)) in own[0]


def test_broken_rows_are_left_out_and_counted_by_reason(folder, tmp_path, capsys, cache_in_tmp, offline):
    user, call = {"role": "user", "content": "a"}, {"function": {"name": "add", "arguments": "{}"}}
    chats = [
        [user], [], [{"role": "users", "content": "a"}], [{"role": "user", "content": "refuse"}],
        [{"role": "user", "content": None}], [{"role": "assistant", "content": "a"}],
        [user, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}],
    ]  # fmt: skip
    source = write(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats])
    known = ("--base", folder, "--source", source, "--output", tmp_path / "own.jsonl", "--max_new_tokens", "4")
    assert cli.run(["distill", *map(str, known)]) == 0
    err = capsys.readouterr().err
    assert f"{source}: left out 5 of 7 rows: 3 malformed (the first is row 2: messages=[]: expected" in err
    assert "; 1 refused by the chat template (the first is row 4: " in err
    assert "; 1 without a message of the user (the first is row 6)" in err


@pytest.mark.parametrize("row", [b'{"text": "caf\xe9"}', b'{"prompt": "caf\xe9"}'])
def test_a_byte_that_is_not_utf8_is_named_by_its_line(row, folder, tmp_path, capsys, cache_in_tmp):
    (tmp_path / "rows.jsonl").write_bytes(row.replace(b"\xe9", b"e") + b"\n" + row + b"\n")
    known = ("--base", folder, "--source", tmp_path / "rows.jsonl", "--output", tmp_path / "own.jsonl")
    assert cli.run(["distill", *map(str, known)]) == 2
    assert f"{tmp_path}/rows.jsonl, line 2: byte 0xe9 at column" in capsys.readouterr().err


def test_several_processes_are_refused(make, tmp_path, monkeypatch, capsys):
    """Each would write every line: the file had them all twice."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AssertionError):
        make([{"messages": messages(*CHATS[1])}])
    said = capsys.readouterr().err
    assert said.startswith("specheads: 2 processes were started") and said.count("\n") == 1
    assert not (tmp_path / "own.jsonl").exists()


def test_a_chat_without_a_template_is_refused(folder, tmp_path, capsys, cache_in_tmp):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tiny_llama(vocab_size=258, num_hidden_layers=3).save_pretrained(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    source = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    known = ("--base", tmp_path / "bare", "--source", source, "--output", tmp_path / "own.jsonl", "--chat")
    assert cli.run(["distill", *map(str, known)]) == 2
    assert "has no chat template" in capsys.readouterr().err
