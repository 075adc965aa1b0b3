"""The command line on encoder-decoders: generate, chat and bench write the text of their own generate()."""

import io
import json
import shlex
import sys

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from specheads.models.base.loading import load_language_model
from tests.support import t5_on_disk
from tests.support.command_line import run
from tests.support.tiny_models import near

PROMPT = "abab cd abab"
NEW = 12
ROWS = [{"question": f"What is {'just ' * n}{n} and {n}", "answer": f"#### {2 * n}"} for n in range(3)]


@pytest.fixture(scope="module", params=["t5", "bart"])
def pair(request, tmp_path_factory):
    """Folders of a target and of a draft model that is often right; and the target's greedy ids after PROMPT."""
    folder = tmp_path_factory.mktemp(request.param)
    target = getattr(t5_on_disk, request.param)()
    t5_on_disk.save(near(target, 0.002), folder / "small")
    t5_on_disk.save(target, folder / "large")
    ids = t5_on_disk.byte_tokenizer()(PROMPT, return_tensors="pt").input_ids
    return folder, target.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 1:].tolist()


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    target = t5_on_disk.t5()
    for name, model in (("large", target), ("base", near(target, 0.001)), ("small", near(target, 0.004))):
        t5_on_disk.save(model, folder / name)
    return folder


def drafters(folder):
    return {
        "nothing named": (), "none": ("--draft", "none",), "model": ("--draft", f"model:{folder / 'small'}"),
        "lookup": ("--draft", "lookup:4"), "ngram": ("--draft", "ngram"), "maxgram": ("--draft", "maxgram"),
        "chain": ("--draft", f"model:{folder / 'small'}", "--tree", "chain:3"), "path": ("--draft", folder / "small"),
        "cascade": ("--draft", f"cascade:model:{folder / 'small'}+maxgram"),
    }  # fmt: skip


@pytest.mark.sampled(2)
def test_generate_writes_transformers_greedy_text_whatever_drafts(pair, capsys):
    folder, expected = pair
    for name, words in drafters(folder).items():
        ask = ("generate", folder / "large", "--prompt", PROMPT, "--max-new-tokens", NEW, "--json", *words)
        code, out, err = run(capsys, *ask)
        assert code == 0, err
        record = json.loads(out)
        assert record["token_ids"] == expected, name
        assert name == "nothing named" or (record["statistics"]["drafted"] > 0) == (name != "none")
        assert record["drafter"] == {
            "nothing named": "auto", "none": None, "lookup": "lookup:4", "ngram": "ngram", "maxgram": "maxgram",
            "cascade": f"cascade:model:{folder / 'small'}+maxgram",
        }.get(name, f"draft model {folder / 'small'}")  # fmt: skip
        if name in ("model", "chain", "path"):
            assert record["statistics"]["accepted"] > 0
    code, out, _ = run(capsys, "generate", folder / "large", "--prompt", PROMPT, "--max-new-tokens", NEW)
    assert code == 0 and out == record["text"] + "\n"


def test_a_plain_decoder_only_model_is_drafted_for_too(shipped, capsys):
    ask = ("generate", shipped / "base", "--prompt", "def f(", "--max-new-tokens", 12, "--json")
    plain = json.loads(run(capsys, *ask, "--draft", "none")[1])["token_ids"]
    for draft in ("maxgram", f"model:{shipped / 'base'}", shipped / "base", shipped / "medusa"):
        record = json.loads(run(capsys, *ask, "--draft", draft)[1])
        assert record["token_ids"] == plain and record["statistics"]["drafted"] > 0
    assert record["drafter"] == "medusa head"
    ask = ("generate", shipped / "eagle3", *ask[2:])
    assert json.loads(run(capsys, *ask)[1])["drafter"] == "auto"
    assert json.loads(run(capsys, *ask, "--draft", "lookup")[1])["token_ids"] == plain


def test_chat_answers_with_an_encoder_decoder(pair, capsys, monkeypatch):
    folder, expected = pair
    lines = f"{PROMPT}\n/tree comb:3,2\n{PROMPT}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    words = ("--draft", f"model:{folder / 'small'}", "--compare", "draft=none", "--max-new-tokens", NEW, "--json")
    code, out, err = run(capsys, "chat", folder / "large", *words)
    assert "chains only" in err  # a tree that branches is refused, and the session continues
    turns = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and len(turns) == 2  # of the tree that was refused
    text = t5_on_disk.byte_tokenizer().decode(expected, skip_special_tokens=True)
    for turn in turns:
        assert turn["text"] == text and turn["same_text"] and turn["accepted_length"] > 1
        (compared,) = turn["compared"]
        assert compared["text"] == text and compared["accepted_length"] == 1


def bench(folder, tmp_path, *words):
    rows = tmp_path / "gsm8k.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf8")
    return ("bench", folder / "large", "--reference", "plain", "--task", f"gsm8k:{rows}", "--max-new-tokens", 8,
            "--temperature", 0, "--repeats", 1, "--no-plots", "--json", *words)  # fmt: skip


@pytest.mark.sampled(2)
def test_bench_measures_encoder_decoders_alike_in_batches_of_any_size(pair, tmp_path, cache_in_tmp, capsys):
    folder, _ = pair
    words = ("-d", f"model:{folder / 'small'}", "--tree", "chain:3", "--accept", "typical:0.5", "--batch", "1,3")
    code, out, err = run(capsys, *bench(folder, tmp_path, *words, "-d", "transformers", "--out", tmp_path / "out"))
    assert code == 0, err
    rows = json.loads(out)["rows"]
    lossless = [row for row in rows if row["lossless"]]
    for row in lossless:  # rows of one batch differ in length, and an encoder must not see that
        assert row["nats"] == pytest.approx(0, abs=1e-5) and row["same_text"] == row["texts"] == len(ROWS)
        assert row["accepted_length"] is None or "model:" not in row["decoder"] or row["accepted_length"] > 1
    assert len(rows) == 8 and any(row["nats"] > 1e-3 for row in rows if not row["lossless"])


def test_a_cascade_of_encoder_decoders_is_reviewed_alike_by_the_target_and_by_its_record(
    t5, tmp_path, cache_in_tmp, capsys
):
    text = f"cascade:model:{t5 / 'base'}+model:{t5 / 'small'}+maxgram k=[[2,1,2],[0,1,2],[0,0,2]] leniency=2"
    ask = bench(t5, tmp_path, "-d", text, "--batch", 1)
    code, out, err = run(capsys, *ask, "--out", tmp_path / "live")
    assert code == 0, err
    live = json.loads(out)["rows"][-1]
    assert live["swi"] > 0 and live["reviews"][1] > 0 and live["accepted_drafts"] > 0
    for _ in range(2):  # the second reads the file
        code, out, err = run(capsys, *ask, "--out", tmp_path / "again", "--record", tmp_path / "record.json")
        assert code == 0, err
        _, again = json.loads(out)["rows"]
    for name in ("tokens", "reviews", "accepted_drafts", "accepted_length"):
        assert again[name] == live[name], name
    assert json.loads((tmp_path / "record.json").read_text())["start"] == 0


REFUSED = [
    ("generate {t5}/large --prompt a --tree comb:3,2", "chains only"),
    ("generate {t5}/large --prompt a --draft head", "there is no head"),
    ("generate {t5}/large --prompt a --draft {head}", "was trained for another base"),
    ("generate {t5}/large --prompt a --chat", "no chat template"),
    ("generate {t5}/large --prompt a --draft model:{base}", "both must read the same"),
    ("generate {t5}/large --prompt a --base {base}", "--base"),
    ("generate {head} --prompt a --base {t5}/large", "was trained for another base"),
    ("generate {base} --prompt a --draft model:{t5}/small", "both must read the same"),
    ("generate {base} --prompt a --draft lookup:x", "'x' "),
    ("generate {vit} --prompt a", "a vit model; expected a decoder-only"),
    ("bench {t5}/large --no-plots -d head", "there is no head"),
    ("bench {t5}/large --no-plots -d nowhere/at/all", "nowhere/at/all"),
    ("chat {t5}/large --tree comb:3,2", "chains only"),
    ("chat {t5}/large --chat", "no chat template"),
    ("parity {t5}/large --data x.jsonl", "not the config of a draft head"),
    ("bench {t5}/large --reference {head} --no-plots", "was trained for another base"),
    ("bench {t5}/large --reference model:{base} --no-plots", "both must read the same"),
]


def test_what_an_encoder_decoder_does_not_do_is_refused_in_one_line(t5, shipped, tmp_path, capsys, monkeypatch):
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text('{"model_type": "vit"}')
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for line, message in REFUSED:
        words = line.format(t5=t5, base=shipped / "base", head=shipped / "medusa", vit=tmp_path / "vit")
        code, out, err = run(capsys, *shlex.split(words))
        ours = [text for text in err.splitlines() if text.startswith("specheads: ")]
        assert code == 2 and not out and len(ours) == 1 and message in ours[0] and len(ours[0]) < 500, (line, err)


def test_one_function_loads_every_kind_of_language_model(t5, shipped):
    assert type(load_language_model(t5 / "large")) is type(AutoModelForSeq2SeqLM.from_pretrained(t5 / "large"))
    assert load_language_model(shipped / "base").config.model_type == "llama"
    with pytest.raises(ValueError, match="eagle3 is a draft head, not a language model; give the model that it drafts"):
        load_language_model(shipped / "eagle3")
    assert load_language_model(t5 / "large", dtype=torch.bfloat16).dtype == torch.bfloat16
