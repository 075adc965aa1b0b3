"""A recorded target: its drafts are reviewed as often as by the target itself."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads import DraftModel, MaxGram, PromptLookup, chain, comb, generate
from specheads.decoding.drafters import AutoDrafter, Cascade
from specheads.decoding.generation import recorded
from tests.support.command_line import run as program
from tests.support.tiny_models import tiny_llama

PROMPTS = [[5, 6, 7, 5, 6], [44], [9, 3, 2, 7, 5, 5, 9, 3]]


def drafters():
    base, small = tiny_llama(), tiny_llama(num_hidden_layers=3)
    drafts = [DraftModel(base), MaxGram(num_tokens=4)]
    return base, {
        "near": (DraftModel(base), comb(3, 2)), "far": (DraftModel(small), chain(4)),
        "lookup": (PromptLookup(width=2), comb(4, 2)), "maxgram": (MaxGram(), chain(5)),
        "cascade": (Cascade(drafts, [[3, 2], [0, 2]]), chain(8)), "auto": (AutoDrafter(), chain(5)),
    }  # fmt: skip


def test_a_replayed_record_is_reviewed_as_often_as_the_target_reviews_and_accepts_as_much(tmp_path):
    base, known = drafters()
    recorded.record(base, PROMPTS, 16).save(tmp_path / "r.json")
    record = recorded.Record.load(tmp_path / "r.json")
    for drafter, plan in known.values():
        real, own = [], []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = generate(
                base, ids, attention_mask=torch.ones_like(ids), draft=drafter, tree=plan, max_new_tokens=16,
                do_sample=False, return_dict_in_generate=True,
            )  # fmt: skip
            real += [(step.tokens, step.accepted, step.drafted) for step in out.steps]
            own.append(getattr(drafter, "reviews", ()))
            replayed = recorded.replay(record, prompt, drafter, plan, base.device)
            assert [(s.tokens, s.accepted, s.drafted) for s in replayed] == real[-len(out.steps) :]
        found = recorded.review(record, PROMPTS, drafter, plan, base.device)
        assert found["reviews"] == len(real) - len(PROMPTS)
        assert found["accepted"] == sum(accepted[0] for _, accepted, _ in real)
        assert found["draft_reviews"] == (recorded.sum_columns(own) if isinstance(drafter, Cascade) else None)


def test_the_target_does_not_decode_when_it_is_replayed(monkeypatch):
    base, known = drafters()
    record = recorded.record(base, PROMPTS[:1], 12)
    drafter, plan = known["lookup"]
    monkeypatch.setattr(base, "forward", None)
    assert recorded.review(record, PROMPTS[:1], drafter, plan, base.device)["tokens"] == 12


def test_what_a_record_cannot_replay_is_refused(tmp_path, model):
    base, known = drafters()
    record = recorded.record(base, PROMPTS[:1], 5)
    with pytest.raises(ValueError, match="not in the record"):
        list(recorded.replay(record, [1, 2], *known["lookup"], base.device))
    with pytest.raises(ValueError, match="from the target's features"):
        list(recorded.replay(record, PROMPTS[0], model.head, chain(2), base.device))
    with pytest.raises(ValueError, match="cannot draft for the recorded target"):
        list(recorded.replay(replace(record, start=1), PROMPTS[0], *known["near"], base.device))
    for text in ("[]", "{", '{"vocab_size": 5, "length": 1, "outputs": [{"prompt": [1], "output": [7]}]}'):
        (tmp_path / "bad.json").write_text(text, "utf8")
        with pytest.raises(ValueError, match=r"is no record of a target"):
            recorded.Record.load(tmp_path / "bad.json")


def ask(capsys, shipped, folder, *words, out="out", length=8):
    path = folder / "prompts.txt"
    path.write_text("def f(x, x, x):\nimport os\n", "utf8")
    return program(
        capsys, "bench", shipped, "--prompts", path, "--reference", "plain", "--batch", 1, "--temperature", 0,
        "--repeats", 1, "--max-new-tokens", length, "--out", folder / out, "--record", folder / "record.json", "--json",
        *words,
    )  # fmt: skip


def test_a_record_of_another_target_or_of_shorter_texts_is_refused_and_a_longer_one_cut(
    shipped, tmp_path, capsys, hf_log
):
    path, lookup = tmp_path / "record.json", ("-d", "lookup")
    rows = [json.loads(ask(capsys, shipped, tmp_path, *lookup, length=n)[1])["rows"] for n in (8, 4)]
    assert [row["decoder"] for row in rows[0]] == ["plain", "lookup"] and rows[0][0]["speed_up"] is None
    assert rows[0][1]["tokens"] > rows[1][1]["tokens"] > 0
    code, _, err = ask(capsys, shipped, tmp_path, *lookup, length=9)
    assert code == 2 and "holds 8 tokens of each text, and 9 are asked for; delete or rename the file" in err
    other = shutil.copytree(shipped, tmp_path / "other")
    base = LlamaForCausalLM.from_pretrained(other / "base")
    torch.nn.init.normal_(base.lm_head.weight)
    base.save_pretrained(other / "base")
    code, _, err = ask(capsys, other, tmp_path, *lookup)
    assert code == 2 and "with other weights; delete or rename the file" in err
    record = json.loads(path.read_text("utf8"))
    path.write_text(json.dumps({**record, "vocab_size": 300, "base": None}), "utf8")
    assert "with other vocab_size" in ask(capsys, shipped, tmp_path, *lookup)[2]
    path.write_text(json.dumps({**record, "base": None}), "utf8")
    code, _, _ = ask(capsys, shipped, tmp_path, *lookup, out="new")
    assert code == 0 and "does not say which target it is of" in hf_log.text


def test_cascades_are_compared_by_the_record_of_a_target(shipped, tmp_path, capsys):
    parts = f"cascade:model:{shipped / 'base'}+maxgram"
    words = ("-d", f"{parts} k=[[3,2],[0,2]]", "-d", f"{parts} k=[[1,1],[0,1]]")
    code, out, err = ask(capsys, shipped, tmp_path, *words, length=12)
    assert code == 0, err
    plain, *rows = json.loads(out)["rows"]
    assert plain["reviews"] is None and plain["accepted_length"] == 1
    for row in rows:
        assert row["swi"] > 0 and row["reviews"][1] > 0 and row["accepted_drafts"] > 0 and row["speed_up"] is None
    assert rows[0]["reviews"][0] < rows[1]["reviews"][0]
    code, out, err = program(capsys, "bench", shipped, *words, "--prompts", tmp_path / "prompts.txt", "--reference",
                             "plain", "--batch", 1, "--temperature", 0, "--repeats", 1, "--max-new-tokens", 12,
                             "--out", tmp_path / "live", "--no-plots", "--json")  # fmt: skip
    assert code == 0, err
    for row, live in zip(rows, json.loads(out)["rows"][1:], strict=True):
        for name in ("tokens", "reviews", "accepted_drafts", "accepted_length"):
            assert row[name] == live[name], name


def test_what_cannot_be_replayed_is_refused_before_the_target_is_recorded(shipped, tmp_path, capsys):
    for words in (("-d", "lookup", "--accept", "topn"), ("-d", "lookup", "--temperature", 1), ("-d", "transformers")):
        code, _, err = ask(capsys, shipped, tmp_path, *words)
        assert code == 2 and "--record replays greedy text under the exact rule" in err, words
    assert not (tmp_path / "record.json").exists()
