"""specheads generate, info."""

import inspect
import json
import re
import sys

import pytest
import torch
from transformers import AutoTokenizer

import specheads
from specheads.cli import program as cli
from specheads.cli import text
from specheads.models.convert import convert
from tests.support.command_line import CONTROL, run
from tests.support.tiny_models import tiny_llama


def test_generate_gives_the_same_text_whatever_the_tree(shipped, capsys):
    for head, trees in {
        "medusa": ("chain:2", "dynamic:9,2,3", "static:8"),
        "eagle3": ("comb:2,3", "sampled:2,1"),
    }.items():
        ask = ("generate", shipped / head, "--prompt", "def f(", "--max-new-tokens", 16, "--json")
        plain = json.loads(run(capsys, *ask, "--draft", "none")[1])
        assert plain["draft_depths"] == [0] * 16 and plain["drafter"] is None
        for tree in trees:
            code, out, _ = run(capsys, *ask, "--tree", tree)
            record = json.loads(out)
            assert code == 0 and record["text"] == plain["text"] and record["token_ids"] == plain["token_ids"]
            assert record["statistics"]["drafted"] > 0 and record["tree"] == tree
            assert sum(depth > 0 for depth in record["draft_depths"]) == record["statistics"]["accepted"]


def test_the_text_goes_to_stdout_whole_and_plain_without_a_terminal(shipped, capsys):
    ask = ("generate", shipped / "eagle3", "--prompt", "x = ", "--max-new-tokens", 24)
    wanted = json.loads(run(capsys, *ask, "--json")[1])["text"]
    code, out, err = run(capsys, *ask)
    assert code == 0 and out == wanted + "\n"
    assert "24 tokens in" in err and "accepted length" in err and not CONTROL.search(err)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("too late")])
def test_a_text_that_breaks_off_ends_its_line(error, shipped, capsys, monkeypatch):
    """So that what is said of it begins a line; if nothing was printed, stdout stays empty."""
    shown = [torch.tensor([[5, 6]]), torch.tensor([7]), torch.tensor([8])]

    def breaks(*args, streamer, **kwargs):
        for ids in shown:
            streamer.put(ids)
        raise error

    monkeypatch.setattr(text, "generate", breaks)
    ask = ("generate", shipped / "medusa", "--prompt", "x = ")
    code, out, err = run(capsys, *ask)
    assert code in (2, 130) and out.endswith("\n") and len(out) > 1
    assert err.splitlines()[-1] == f"specheads: {error if code == 2 else 'stopped'}"
    del shown[1:]
    assert run(capsys, *ask)[1] == ""


def test_a_prompt_comes_from_stdin_too(shipped, tmp_path, capsys, monkeypatch):
    ask = ("generate", shipped / "medusa", "--max-new-tokens", 8, "--json")
    given = run(capsys, *ask, "--prompt", "import os\n")[1]
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n", "utf-8-sig")  # with a byte order mark, as editors on Windows save it
    with open(file, encoding="utf8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert json.loads(run(capsys, *ask)[1])["text"] == json.loads(given)["text"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as locales have them
def test_a_prompt_that_is_not_utf8_is_one_line(errors, shipped, tmp_path, capsys, monkeypatch):
    said = "is not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"
    ask = ["specheads", "generate", str(shipped / "medusa")]
    (tmp_path / "piped").write_bytes(b"a\xff\xfe")
    with open(tmp_path / "piped", encoding="utf8", errors=errors) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        for given, source in (([], "stdin"), (["--prompt", "a\udcff\udcfe"], "--prompt")):
            monkeypatch.setattr(sys, "argv", [*ask, *given])
            with pytest.raises(SystemExit, match="2"):
                cli.main()
            assert capsys.readouterr().err == f"specheads: {source} {said}\n"


def test_chat_puts_the_prompt_into_the_template_once(shipped, capsys):
    ask = ("generate", shipped / "medusa", "--max-new-tokens", 4, "--json")
    record = json.loads(run(capsys, *ask, "--prompt", "hi", "--chat")[1])
    assert record["prompt"] == "<user>hi<a>"
    assert record["text"] == json.loads(run(capsys, *ask, "--prompt", "<user>hi<a>")[1])["text"]


def test_a_seed_gives_the_same_sample_and_another_seed_another(shipped, capsys):
    ask = ("generate", shipped / "eagle3", "--prompt", "a", "--max-new-tokens", 24, "--temperature", 1, "--json")

    def text(seed):
        return json.loads(run(capsys, *ask, "--seed", seed)[1])["token_ids"]

    assert text(1) == text(1) != text(2)


def test_python_takes_the_text_that_the_command_takes(shipped, small, capsys):
    model = specheads.SpecModel.from_pretrained(shipped / "eagle3", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(shipped / "base")
    inputs = tokenizer("def f(", return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    ask = ("generate", shipped / "eagle3", "--prompt", "def f(", "--max-new-tokens", 12, "--json", "--draft")
    names = inspect.signature(specheads.SpecModel.generate).parameters
    assert {"draft", "tree", "accept", "seed"} <= set(names) and names["draft"].default == "auto"
    for draft in ("head", "lookup", f"model:{small}", str(shipped / "medusa"), f"cascade:model:{small}+maxgram"):
        record = json.loads(run(capsys, *ask, draft)[1])
        out = model.generate(**inputs, draft=draft, **options)
        assert out.sequences[0, inputs["input_ids"].shape[1] :].tolist() == record["token_ids"]
        assert out.statistics()["drafted"] == record["statistics"]["drafted"], draft
    plain = specheads.generate(model.base, **inputs, draft=f"model:{small}", tree="adaptive:4", **options)
    assert plain.sequences.equal(out.sequences) and plain.statistics()["drafted"] > 0
    with pytest.raises(ValueError, match="unknown drafter 'lokup'; did you mean 'lookup'"):
        model.generate(**inputs, draft="lokup", **options)
    with pytest.raises(FileNotFoundError, match="nowhere/at/all"):
        model.generate(**inputs, draft="nowhere/at/all", **options)


def test_info_says_what_a_checkpoint_holds(shipped, capsys):
    record = json.loads(run(capsys, "info", shipped / "eagle3", "--json")[1])
    assert record["kind"] == "eagle3" and record["base"] == "../base" and record["options"]["steps"] == 2
    assert record["tapped_layers"] == record["options"]["taps"] and record["draft_vocabulary"] == 258
    head = convert(tiny_llama(vocab_size=258, num_hidden_layers=4), "eagle3", steps=2).head
    assert record["parameters"] == sum(p.numel() for p in head.parameters())
    assert record["base_fingerprint"]["num_hidden_layers"] == 4
    assert json.loads(run(capsys, "info", shipped / "medusa", "--json")[1])["tapped_layers"] == [4]
    code, out, _ = run(capsys, "info", shipped / "eagle3")
    assert code == 0 and re.search(r"kind +eagle3", out) and "draft vocabulary" in out
