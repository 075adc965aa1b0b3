"""specheads train, demo."""

import io
import json
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer
from transformers.integrations import integration_utils

from specheads.bench import environment
from specheads.cli.commands import show_mask
from specheads.cli.demo import live, race, story
from specheads.cli.script import as_overrides
from tests.support.command_line import CONTROL, run
from train import heads


def test_train_hands_the_recipe_and_its_overrides_on(shipped, tmp_path, capsys, caplog):
    data, recipe, out_dir = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml", tmp_path / "out"
    data.write_text("".join(json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 3}) + "\n" for i in range(8)))
    recipe.write_text(
        f"base: {shipped / 'base'}\nhead: {{kind: medusa, num_heads: 3}}\nparity: {{prompts: 0}}\n"
        f"data: {{train: {data}, max_length: 32, eval_fraction: 0.25}}\n"
        f"training: {{output_dir: {out_dir}, max_steps: 1, report_to: none, per_device_train_batch_size: 2,\n"
        "  eval_strategy: steps, eval_steps: 1}\n"
    )
    ask = ("train", recipe, "head.num_heads=1")
    code, out, _ = run(capsys, *ask, "parity.prompts=2", "--json")
    assert code == 0 and json.loads(out)["eval_accepted_length"] >= 1, "one JSON object and nothing else"
    assert json.loads(run(capsys, "info", out_dir, "--json")[1])["options"]["num_heads"] == 1
    code, out, _ = run(capsys, *ask, "training.resume_from_checkpoint=auto")
    assert code == 0 and f"saved {out_dir}" in out
    message = f"{out_dir} holds a finished head: it is replaced when this run ends"
    assert message not in caplog.text
    assert run(capsys, "train", recipe)[0] == 0 and message in caplog.text
    code, _, err = run(capsys, "train", recipe, "training.max_stesp=1")
    assert code == 2 and "max_steps" in err


@pytest.fixture
def chats(shipped, tmp_path):
    """What a recipe is given to train on chats, of which one is broken, by a base whose template writes <|role|>."""
    base = tmp_path / "base"
    shutil.copytree(shipped / "base", base)
    (base / "chat_template.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{% if fast and m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% if fast %}<think></think>{% endif %}{% endif %}"
    )
    turns = [("user", "ask \x1b[31m"), ("assistant", "first"), ("user", "SECRET"), ("assistant", "second")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}, {"messages": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["medusa", f"base={base}", f"data.train={tmp_path}/rows.jsonl", "data.eval_fraction=0"]


def test_masks_are_shown_and_dropped_rows_counted(chats, capsys, caplog, cache_in_tmp):
    code, out, _ = run(capsys, "train", *chats, "--show-mask", "9")
    assert code == 0 and CONTROL.search(out) is None
    end = r"<\|\w+\|>⟧"
    assert re.search(rf"<\|assistant\|>⟦first{end}<\|user\|>SECRET<\|assistant\|>⟦second{end}\n", out)
    assert out.rstrip().endswith("1 of 1 rows to train on; what is learnt is in ⟦ ⟧")
    assert "dropped 1 of 2 rows: 1 malformed (the first is row 2: messages=[]" in caplog.text
    code, out, _ = run(capsys, "train", *chats, "data.chat_template_kwargs={fast: true}", "--show-mask=1")
    assert "<|assistant|><think></think>⟦first<|" in out
    code, _, err = run(capsys, "train", "medusa", "base=nobody/nothing", "features=saved", "--show-mask", "1")
    assert code == 2 and "saved features have no text to show" in err


def test_a_role_at_which_the_base_stops_is_learnt_after_an_answer(chats, tmp_path, capsys, cache_in_tmp):
    """As with GLM-4.5, whose generation config has <|user|> among the tokens that end an answer."""
    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ pad_token if m.role == 'user' else '<|assistant|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(base)
    ask, end = tokenizer.pad_token, tokenizer.pad_token_id
    assert end not in (None, tokenizer.eos_token_id)
    config = json.loads((base / "generation_config.json").read_text())
    for ends, shown in ((tokenizer.eos_token_id, f"⟦first⟧{ask}SECRET"), ([0, end], f"⟦first{ask}⟧SECRET")):
        (base / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
        code, out, _ = run(capsys, "train", *chats, "--show-mask", "1")
        assert code == 0 and shown in out


def test_masks_are_in_colour_on_a_terminal():
    console, row = Console(file=io.StringIO(), force_terminal=True), {"input_ids": [5, 6], "labels": [-100, 6]}
    show_mask.print_row(console, 1, row, SimpleNamespace(decode=lambda ids, **_: f"<{ids[0]}>"))
    assert re.search(r"<5>\x1b\[0m\x1b\[1;32m<6>", console.file.getvalue()) and "⟦" not in console.file.getvalue()


def test_a_training_option_that_cannot_be_is_one_line_and_exit_code_2(capsys, monkeypatch):
    """Of the program and of the script that `accelerate launch` starts."""
    monkeypatch.setattr(integration_utils, "get_available_reporting_integrations", list)
    for override, message in {
        "learning_rate=fast": "training.learning_rate='fast': expected a number",
        "report_to=wandb": "training.report_to=wandb: wandb is not installed; pip install wandb, or give training.",
    }.items():
        given = ["recipes/medusa.yaml", "training.bf16=false", "training.output_dir=nowhere", f"training.{override}"]
        code, out, err = run(capsys, "train", *given)
        assert (code, out, len(err.splitlines())) == (2, "", 1) and err.startswith(f"specheads: {message}")
        assert heads.main(given) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and err.startswith(f"train/heads.py: {message}")


@pytest.fixture
def demo(shipped, tmp_path, capsys, monkeypatch):
    """Run a short demo, with these changes of story's names."""
    monkeypatch.setattr(story, "NEW_TOKENS", 8)
    monkeypatch.setattr(story, "NUM_PROMPTS", 1)
    monkeypatch.setattr(story, "NUM_WATCHED", 1)

    def run_demo(*words, **changes):
        for name, value in changes.items():
            monkeypatch.setattr(story, name, value)
        options = ("--checkpoints", shipped, "--minutes", 0.02, "--output", tmp_path / "head")
        return run(capsys, "demo", *options, *words)

    return run_demo


def test_the_demo_runs_end_to_end(demo, tmp_path, capsys):
    code, out, err = demo("--json", NEW_TOKENS=12, NUM_PROMPTS=2)
    assert code == 0, out + err
    assert "\x1b[" not in err
    figures, story_text = json.loads(out), err
    assert figures["same_text"] is True and "every text is the same" in story_text
    names = ["transformers", "plain", "lookup", "head", "head, shipped", "auto"]
    assert list(figures["decoders"]) == names and all(name in story_text for name in names)
    assert "12 tokens: 12 passes → " in story_text and "were accepted drafts" in story_text
    curve = [point["accepted_length"] for point in figures["training"]["history"]]
    assert len(curve) > 1 and story_text.count(" tokens a pass  █") == len(curve)
    assert json.loads(run(capsys, "info", tmp_path / "head", "--json")[1])["kind"] == "eagle3"


def test_the_demo_notices_a_text_that_differs(demo, monkeypatch):
    real = race.specheads_generate

    def wrong(model, length, **kwargs):
        decode = real(model, length, **kwargs)

        def run(batch, watch):
            out = decode(batch, watch)
            out.tokens[0][3] += 1
            return out

        return run

    monkeypatch.setattr(race, "specheads_generate", wrong)
    code, out, _ = demo(show_elsewhere=lambda *args: [])
    assert code == 1 and "not every text is the same" in out and "from token 4 on" in out
    assert "the restored process wrote another text" in out


def test_the_demo_tells_a_near_tie_from_a_text_that_is_the_same(demo, monkeypatch):
    ties = ([], ["head on prompt 1 from token 4 on"])
    monkeypatch.setattr(race, "differences", lambda *args: ties)
    code, out, err = demo("--json", show_elsewhere=lambda *args: [])
    assert code == 0 and "but for near ties: head on prompt 1" in " ".join(err.split())
    assert json.loads(out)["same_text"] is False


def test_the_demos_training_ends_when_held_out_text_accepts_enough(demo):
    options = partial(story.LiveOptions, enough=0.5, continue_time=0.0)
    code, out, err = demo("--minutes", 0.3, "--json", show_elsewhere=lambda *args: [], LiveOptions=options)
    assert code == 1 and "0.5 are reached: 1." in err, "the time is not used up, and no text was restored"
    assert len(json.loads(out)["training"]["history"]) == 2


def test_the_demo_says_that_other_programs_took_part_of_its_minutes():
    options = live.LiveOptions(minutes=3, seed=0)
    for length, load, said in (
        (1.5, 2.4, "3 minutes are up"),
        (1.5, None, "3 minutes are up"),
        (1.5, 2.6, "3 minutes are up, part of them with other programs (2 cores with a load of 2.6)"),
        (2.0, 2.6, "2 are reached"),
    ):
        assert live.ending(length, options, {"cores": 2, "load_average": load}) == said


def demo_figures(load, **speed_ups):
    """What the demo shows at this load of two cores, of decoders that are so much faster than plain decoding."""
    rows = {
        name: {"tokens": 96, "texts": 2, "accepted_length": 1.0 if name == "plain" else 2.0, "speed_up": speed_up,
               "tokens_per_second": 100 * speed_up}
        for name, speed_up in {"plain": 1.0, "head": 1.5, "auto": 1.5, **speed_ups}.items()
    }  # fmt: skip
    file = io.StringIO()
    where = {**environment.environment(), "cores": 2, "load_average": load}
    race.print_figures(rows, where, 48, Console(file=file, width=80, color_system=None))
    return file.getvalue()


def test_the_demo_shows_passes_before_speeds_and_says_why_a_decoder_loses():
    shown = demo_figures(2.1, head=0.8)
    assert shown.startswith("48 tokens: 48 passes → 24 with the head, 24 with auto")
    ends = [line.split()[-3:] for line in shown.splitlines()]
    assert ["24", "80", "0.8×"] in ends and ["24", "150", "1.5×"] in ends and max(map(len, shown.splitlines())) <= 80
    said = " ".join(shown.split())
    assert "head loses to plain: it gains 2.00 tokens a pass, but a pass takes 2.5 times as long" in said
    assert "auto loses" not in said and "plain loses" not in said


def test_the_demo_of_a_busy_machine_shows_no_speed():
    shown = demo_figures(2.6, head=0.8)
    assert "2 cores with a load of 2.6" in shown and "48 passes → 24" in shown
    assert not any(word in shown for word in ("tokens/s", "×", "loses"))


@pytest.mark.parametrize(("row_seconds", "texts"), [(0.02, 8 + 16 + 21 * 32), (1.0, 8), (3.0, 0)])
def test_the_demos_base_continues_as_many_prompts_as_its_time_allows(row_seconds, texts, monkeypatch):
    """A base whose pass over a batch takes so long a row, and which stops at max_time: a slow one finishes some."""
    now = 0.0

    def generate(windows, max_new_tokens, max_time, **_):
        nonlocal now
        took = row_seconds * len(windows)
        now += min(took, max_time)
        return torch.zeros(len(windows), windows.shape[1] + (max_new_tokens if took <= max_time else 1))

    monkeypatch.setattr(live.time, "monotonic", lambda: now)
    base = SimpleNamespace(generate=generate, device="cpu")
    made = live.continuations(base, torch.arange(500), live.LiveOptions(minutes=2, seed=0), 14.4, lambda *_: None)
    assert made.shape == (texts, 160)


def test_a_flag_of_a_recipes_option_is_its_key_and_value():
    """As other trainers spell them; of two options of one name it is the training section's."""
    known = ["--dry-run", "--output"]
    for words, meant in (
        ("eagle3 --learning_rate 1e-3 base=a", "eagle3 training.learning_rate=1e-3 base=a"),
        ("--learning-rate=1e-3 eagle3", "training.learning_rate=1e-3 eagle3"),
        ("--bf16 eagle3 --fp16 false", "training.bf16=true eagle3 training.fp16=false"),
        ("--bf16 --dry-run", "training.bf16=true --dry-run"),
        ("--seed 3 --data.seed 4", "training.seed=3 data.seed=4"),
        ("--base a --max_length 9 --kind mtp", "base=a data.max_length=9 head.kind=mtp"),
        ("--output --lr 1 --head.seed 2", "--output --lr 1 --head.seed 2"),
    ):
        assert as_overrides(words.split(), known) == meant.split()
