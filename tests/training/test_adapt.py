"""specheads adapt: what is held out, what is measured, what is trained, what is written, and resuming."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads import SpecModel, convert
from specheads.training.adapt import run as adapt_run
from specheads.training.adapt.budget import Budget
from specheads.training.adapt.sessions import domain_of, has_answer, prompts, read_sessions, split, token_rows
from tests.support.command_line import run, ship

NEW = 12


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """With an EAGLE-3 head that servers can read, too."""
    folder = ship(tmp_path_factory.mktemp("shipped"))
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = convert(base, "eagle3", steps=2, taps=(1, 2, 3), norm_before_residual=False)
    model.save_pretrained(folder / "eagle3")
    return folder


@pytest.fixture(scope="module")
def rows():
    """Sessions of two domains, half of which have no answer."""
    words = random.Random(0)
    made = []
    for number in range(2, 26):
        text = "".join(words.choice("abc ") for _ in range(8))
        if number % 2:
            made.append({"domain": "code", "text": f"def {text}():\n    return {number}\n"})
        else:
            made.append({"domain": "talk", "messages": [{"role": "user", "content": "ab" * number}]})
    return made


@pytest.fixture
def adapt(shipped, rows, tmp_path, capsys, cache_in_tmp, offline):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")

    def run_adapt(head, *words, output="out"):
        known = ("--data", tmp_path / "rows.jsonl", "--output", tmp_path / output, "--held-out", 6)
        sizes = ("--max-length", 64, "--max-new-tokens", NEW)
        return run(capsys, "adapt", head, *known, *sizes, *words)

    return run_adapt


def written(rows, folder):
    (folder / "sessions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    return read_sessions([str(folder / "sessions.jsonl")])


def counted(head, base, asked):
    """Tokens and steps after the prefill of each domain, by the model's own generate()."""
    model = SpecModel.from_pretrained(head, base=base, dtype="auto")
    model.head.to(model.base.dtype)
    counts = {}
    for prompt in asked:
        out = model.generate(torch.tensor([prompt.ids]), draft="head", max_new_tokens=NEW, do_sample=False,
                             return_dict_in_generate=True)  # fmt: skip
        tokens, steps = counts.get(prompt.domain, (0, 0))
        new = out.sequences.shape[1] - len(prompt.ids) - len(out.steps[0].tokens[0])
        counts[prompt.domain] = tokens + new, steps + len(out.steps) - 1
    return {domain: tokens / steps for domain, (tokens, steps) in counts.items()}


def test_what_is_measured_is_not_trained_on_and_every_domain_is_measured(rows, tmp_path, cache_in_tmp):
    twice = written([*rows, *rows], tmp_path)
    assert len(twice) == len(rows), "the same session twice may not be on both sides"
    for held_out, measured in ((1, 2), (6, 6), (100, 6)):  # one of each domain at least, a quarter at most
        train, chosen = split(twice, held_out, seed=0)
        assert len(chosen) == measured and {domain_of(row) for row in chosen} == {"code", "talk"}
        assert len(train) + len(chosen) == len(rows) and not any(row in train for row in chosen)
    assert split(twice, 6, seed=0) == split(twice, 6, seed=0) != split(twice, 6, seed=1)
    alone = [{"domain": name, "text": "a b c"} for name in "ab"]
    for few in (alone, alone[:1]):
        with pytest.raises(ValueError, match="sessions"):
            split(few, 6, 0)


def test_the_base_is_asked_the_last_question_of_a_session(shipped):
    tokenizer = AutoTokenizer.from_pretrained(shipped / "base")
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    shares = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    for row, asked, answered in (
        ({"messages": [user, said, user, said]}, "<user>a<assistant>b<user>a<a>", True),
        ({"messages": [user]}, "<user>a<a>", False),
        ({"conversations": shares}, "<user>a<a>", True),
        ({"prompt": "def f"}, "def f", False),
        ({"text": "abcdefgh"}, "abcd", True),
        ({"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, -100, 8, 9]}, [5, 6, 7], True),
    ):
        ids = asked if isinstance(asked, list) else tokenizer(asked)["input_ids"]
        (prompt,) = prompts([row], tokenizer, 100)
        assert prompt.ids == ids and has_answer(row) == answered, row
        assert prompts([row], tokenizer, 2, "old")[0].ids == ids[-2:]
    assert token_rows([], tokenizer, 9, ())[0] == [], "the base answers all"
    made, dropped = token_rows([{"text": "abcdefgh"}, {"messages": []}], tokenizer, 5, ())
    assert [len(row["input_ids"]) for row in made] == [5, 4] and dropped.total == 1


def test_a_head_of_ours_and_one_of_another_program_are_adapted_and_written_back(
    adapt, shipped, rows, tmp_path, capsys, monkeypatch
):
    """The figures are those of generate() with the head before and after, on the base's own texts."""
    base, served = shipped / "base", tmp_path / "served"
    code, _, err = run(capsys, "export", shipped / "eagle3", served, "--to", "vllm", "--dtype", "bfloat16")
    assert code == 0, err
    monkeypatch.setattr(adapt_run, "EPOCHS", 12)
    _, held_out = split(written(rows, tmp_path), 6, 0)
    asked = prompts(held_out, AutoTokenizer.from_pretrained(base), 64 - NEW)
    for name, head, options in (
        ("ours", shipped / "medusa", ("--learning-rate", 5e-3)),
        ("theirs", served, ("--base", base, "--tokens", 500)),
    ):
        code, out, err = adapt(head, *options, "--json", output=name)
        record = json.loads(out)
        assert code in (0, 3) and code == 3 * (record["after"] < record["before"]), err
        for when, folder in (("before", head), ("after", tmp_path / name)):
            expected = counted(folder, base, asked)
            assert {domain: one[when] for domain, one in record["domains"].items()} == pytest.approx(expected)
        if name == "ours":
            talk = record["domains"]["talk"]
            assert talk["after"] > talk["before"], "it was trained on what the base says there"
            assert record["steps"] == 12 * -(-record["rows"] // adapt_run.BATCH) and "served" not in record
        else:
            assert record["tokens"] < 500 + 64 * adapt_run.BATCH
            theirs, back = (load_file(folder / "model.safetensors") for folder in (head, tmp_path / name / "served"))
            assert {key: (t.shape, t.dtype) for key, t in theirs.items()} == {
                key: (t.shape, t.dtype) for key, t in back.items()
            }
            assert any(not torch.equal(theirs[key], back[key]) for key in theirs)
            assert counted(tmp_path / name / "served", base, asked) == pytest.approx(expected)
        card = (tmp_path / name / "README.md").read_text("utf8")
        for domain, one in record["domains"].items():
            assert f"| {domain} | {one['prompts']} | {one['before']:.2f} | {one['after']:.2f} |" in card
    # Texts are the base's own: what the rows lacked it wrote itself.
    plain = AutoModelForCausalLM.from_pretrained(base)
    lines = (tmp_path / "ours/sessions/answers.jsonl").read_text("utf8").splitlines()
    assert len(lines) == sum(not has_answer(row) for row in split(written(rows, tmp_path), 6, 0)[0])
    row = json.loads(lines[0])
    start = next(at for at, label in enumerate(row["labels"]) if label != -100)
    text = plain.generate(torch.tensor([row["input_ids"][:start]]), max_new_tokens=NEW, do_sample=False)[0]
    assert text.tolist() == row["input_ids"]


def test_a_stopped_run_resumes_where_it_was(adapt, shipped, tmp_path, monkeypatch):
    measure, calls = adapt_run.measure, []

    def stopped_at(number):
        def measured(*args):
            calls.append(number)
            if len(calls) == number:
                raise KeyboardInterrupt
            return measure(*args)

        return measured

    ask = (shipped / "medusa", "--tokens", 300)
    for number, when in ((1, "before"), (3, "after")):  # the second run measures before, trains, and stops after it
        monkeypatch.setattr(adapt_run, "measure", stopped_at(number))
        code, _, err = adapt(*ask)
        line = f"specheads: stopped while measuring {when} training; the same command resumes"
        assert code == 130 and err.splitlines()[-1] == line
    trained = (tmp_path / "out/model.safetensors").read_bytes()
    monkeypatch.setattr(adapt_run.Run, "train", lambda run: pytest.fail("it is trained"))
    monkeypatch.setattr(adapt_run.self_distill, "run", lambda options: pytest.fail("the base has answered"))
    monkeypatch.setattr(adapt_run, "measure", measure)
    code, out, _ = adapt(*ask)
    assert code in (0, 3) and "Tokens a step, on the same greedy texts" in out
    assert (tmp_path / "out/model.safetensors").read_bytes() == trained
    code, _, err = adapt(*ask, "--seed", 4)
    assert code == 2 and "was begun with other options (seed: 0, not 4): resume it with the same" in err
    assert adapt(shipped / "nowhere", output="new")[0] == 2 and not (tmp_path / "new").exists(), "a typo leaves nothing"


def test_adapters_of_a_rank_are_merged_into_the_head(adapt, shipped, tmp_path):
    assert adapt(shipped / "eagle3", "--rank", 2, "--tokens", 300, "--old", tmp_path / "rows.jsonl")[0] in (0, 3)
    before, after = (load_file(folder / "model.safetensors") for folder in (shipped / "eagle3", tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {key: after[key] - before[key] for key in before if not torch.equal(after[key], before[key])}
    assert changed and all(torch.linalg.matrix_rank(delta, rtol=1e-3) <= 2 for delta in changed.values())
    record = json.loads((tmp_path / "out/sessions/record.json").read_text("utf8"))
    assert record["domains"]["old"]["prompts"] == 6


def test_a_worse_head_is_exit_code_3_and_a_dry_run_writes_nothing(adapt, shipped, tmp_path, monkeypatch):
    code, out, _ = adapt(shipped / "medusa", "--dry-run")
    assert code == 0 and "have the base answer 9 of 18 sessions" in out and not (tmp_path / "out").exists()
    steps = iter((10, 20))
    monkeypatch.setattr(
        adapt_run, "measure", lambda *args: {"code": {"prompts": 1, "tokens": 40, "steps": next(steps)}}
    )
    code, out, _ = adapt(shipped / "medusa", "--tokens", 100)
    assert code == 3 and "-50.0%" in out and "keep the old head" in out
    code, _, err = adapt(shipped / "medusa", "--minutes", 0, output="no")
    assert code == 2 and "--minutes 0 must be above 0" in err


def test_training_ends_when_the_first_of_time_tokens_and_steps_is_spent(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("specheads.training.adapt.budget.time.monotonic", lambda: now)
    budget = Budget(seconds=100, tokens=1000, spent=tmp_path / "spent.json")
    cases = ((0, 0, 0, 0.0), (50, 0, 0, 0.5), (50, 700, 0, 0.7), (50, 0, 9, 0.9), (200, 0, 0, 1))
    for time, tokens, step, share in cases:
        now = float(time)
        state = SimpleNamespace(global_step=step, max_steps=10, num_input_tokens_seen=tokens)
        control = SimpleNamespace(should_training_stop=False)
        budget.on_step_end(None, state, control)
        assert budget.done == pytest.approx(share) and control.should_training_stop == (share >= 1)
    assert budget.factor(0) == pytest.approx(0.1), "a tenth of the peak at the end"
    budget.done = 0.0
    assert 0 < budget.factor(0) < 0.5
    budget.done = 0.05
    assert budget.factor(0) == pytest.approx(0.955)
    budget.on_save(None, state, control)
    now = 1000.0
    resumed = Budget(seconds=400, tokens=1e9, spent=tmp_path / "spent.json")
    assert resumed.share(SimpleNamespace(global_step=0, max_steps=0, num_input_tokens_seen=0)) == pytest.approx(0.5)
