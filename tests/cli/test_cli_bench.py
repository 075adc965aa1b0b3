"""specheads bench, from the command line to its files."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import CompileConfig

from specheads.bench import decoders
from tests.support.command_line import CONTROL, run

FAKE = Path(__file__).parents[1] / "workers" / "fake_peer.py"
ENGINE = """
from dataclasses import dataclass
from pathlib import Path
from specheads.bench.compare.decoder_spec import DecoderSpec, Engine

@dataclass(frozen=True)
class Fake(DecoderSpec):
    peer = "fake"

    def build(self, setup, cell):
        return setup.peers["fake"].decoder("plain", {{}}, max_new_tokens=setup.max_new_tokens)

ENGINE = Engine("fake", Path({worker!r}), {{"fake": Fake}})
"""
TEXTS = ("plain", "lookup:3", "eagle3 tree=chain:2", "medusa")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "question.jsonl"
    rows = [
        {"category": category, "turns": [f"{category} {i} of {i * 7}"]}
        for i in range(2)
        for category in ("code", "math")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    return path


def asked(shipped, questions, out, *more, texts=TEXTS):
    words = [word for text in texts for word in ("-d", text)]
    return ("bench", shipped, "--prompts", questions, *words, "--max-new-tokens", 8, "--out", out, *more)


def test_a_run_prints_its_tables_and_writes_its_files(shipped, questions, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    texts = (*TEXTS, f"model:{shipped / 'base'} tree=chain:2")
    code, out, err = run(capsys, *asked(shipped, questions, tmp_path, "--batch", "1,2", "--repeats", 2, texts=texts))
    assert code == 0 and not CONTROL.search(out + err)
    record = json.loads((tmp_path / "bench.json").read_text("utf8"))
    assert record["complete"] and record["environment"]["torch"] and record["command"].startswith("specheads")
    assert len(record["rounds"]) == 2 * 2 * (4 + 2) and record["floor"]["weight_bytes"] > 0
    names = ["transformers", *texts]
    assert record["engines"] == {name: "transformers" if name == "transformers" else "specheads" for name in names}
    cells = {(row["batch"], row["temperature"]) for row in record["rows"]}
    assert cells == {(1, 0.0), (1, 0.8), (2, 0.0), (2, 0.8)}
    assert [row["decoder"] for row in record["rows"]] == names * 4
    for row in record["rows"]:
        ours = row["decoder"] != "transformers"
        assert row["same_text"] == (None if row["temperature"] else 4) and row["texts"] == 4
        assert (row["shares"] is not None) == ours
        if ours:
            assert 0.5 < sum(row["shares"].values()) <= 1 and row["step_over_floor"] > 0
            assert set(row["accepted_by_category"]) == {"code", "math"}
        assert row["speed_up_interval"][0] <= row["speed_up"] <= row["speed_up_interval"][1] or not ours
    assert "question.jsonl, batch 2, T = 0.8: speed" in out and "4 of 4" in out and "floor: " in out
    # Drafts by the base itself: of 8 tokens the prefill gives 1, two steps 3 each, and the last one has room for 1.
    assert record["rows"][5]["accepted_length"] == pytest.approx(7 / 3)
    assert record["rows"][5]["accepted_by_depth"] == pytest.approx([2 / 3, 2 / 3])
    text = (tmp_path / "bench.md").read_text("utf8")
    assert "T = 0: what was accepted" in text and "× on new text" in text and "| math |" in text
    assert "| transformers |" in text and "![bench.png](bench.png)" in text and record["command"] in text
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_the_default_sets_are_held_out_files_and_third_party_code(shipped, tmp_path, capsys):
    code, out, _ = run(
        capsys, "bench", shipped, "-d", "plain", "--num-prompts", 3, "--prompt-tokens", 12,
        "--batch", 3, "--temperature", 0, "--repeats", 1, "--max-new-tokens", 4, "--no-plots", "--json",
        "--out", tmp_path,
    )  # fmt: skip
    record = json.loads(out)
    assert code == 0 and [*record["prompt_sets"]] == ["held-out files", "third-party code"]
    assert [row["prompts"] for row in record["rows"]][::2] == [*record["prompt_sets"]]
    assert all(row["same_text"] == 3 for row in record["rows"])
    assert not (tmp_path / "bench.png").exists()


def test_refilled_batches_of_mixed_lengths(shipped, tmp_path, capsys):
    code, out, err = run(
        capsys, "bench", shipped, "-d", "plain refill", "--reference", "plain", "--num-prompts", 3,
        "--prompt-tokens", "3-12", "--batch", 2, "--queue", 3, "--temperature", 0, "--repeats", 1, "--no-plots",
        "--max-new-tokens", "2-8", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0, err
    assert "a round is 3 prompts" in out and "plain refill" in out and "3 of 3" in out
    assert "2 to 8 new tokens" in (tmp_path / "bench.md").read_text("utf8")
    code, _, err = run(capsys, "bench", shipped, "--max-new-tokens", "8-2")
    assert code == 2 and "--max-new-tokens" in err and "the smaller first" in err


def test_ctrl_c_shows_what_is_done_and_the_same_command_resumes(shipped, questions, tmp_path, capsys, monkeypatch):
    ask = asked(
        shipped, questions, tmp_path, "--batch", 1, "--temperature", 0, "--repeats", 1, "--no-plots", texts=["plain"]
    )
    original, calls = decoders.specheads_generate, []

    def stopping(*args, **options):
        decode = original(*args, **options)

        def counted(batch, watch):
            calls.append(1)
            if len(calls) == 3:  # the warm-up, and the second of four prompts
                raise KeyboardInterrupt
            return decode(batch, watch)

        return counted

    monkeypatch.setattr(decoders, "specheads_generate", stopping)
    code, out, err = run(capsys, *ask)
    assert code == 130 and "stopped after 1 rounds: the same command resumes" in out and "plain" in out
    assert re.search(r"measuring [1-9]\d?%  stopped", err)
    code, out, _ = run(capsys, *ask)
    assert code == 0 and "stopped" not in out and len(calls) == 3 + 1 + 3
    assert json.loads((tmp_path / "bench.json").read_text("utf8"))["complete"]


def test_ctrl_c_before_the_first_round_is_one_line_and_leaves_no_folder(
    shipped, questions, tmp_path, capsys, monkeypatch
):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoders, "specheads_generate", stop)
    code, out, err = run(capsys, *asked(shipped, questions, tmp_path / "a" / "b", "--no-plots", texts=["plain"]))
    assert (code, out) == (130, "") and not (tmp_path / "a").exists()
    assert err.splitlines()[-1] == "specheads: stopped before anything was measured"


def test_an_engine_takes_its_turn(shipped, questions, tmp_path, capsys):
    engine = tmp_path / "engine.py"
    engine.write_text(ENGINE.format(worker=str(FAKE)), "utf8")
    code, out, _ = run(
        capsys, *asked(shipped, questions, tmp_path, "--batch", 2, "--temperature", 0, "--repeats", 1, "--no-plots",
                       "--engine", f"{engine}={sys.executable}", "--json", texts=["fake", "plain"]),
    )  # fmt: skip
    record = json.loads(out)
    assert code == 0 and record["peers"]["fake"] == "1.2"
    assert [sorted(one["order"]) for one in record["rounds"]] == [["fake", "plain", "transformers"]] * 2
    row = next(row for row in record["rows"] if row["decoder"] == "fake")
    assert row["tokens_per_second"] == pytest.approx(2 * 8 / 0.25) and row["accepted_length"] == 2
    assert row["same_text"] < 4


def test_transformers_compiled_by_hand_writes_its_own_text(shipped, questions, tmp_path, capsys, monkeypatch):
    torch._dynamo.reset()  # a forward that earlier tests compiled too often is left eager
    monkeypatch.setattr(decoders, "CompileConfig", lambda **given: CompileConfig(**{**given, "backend": "eager"}))
    texts = ["transformers-static", "transformers-lookup:2", f"transformers-assisted:{shipped / 'base'}"]
    options = ("--batch", "1,3", "--temperature", 0, "--repeats", 1, "--no-plots", "--json")
    code, out, _ = run(capsys, *asked(shipped, questions, tmp_path, *options, texts=texts))
    record = json.loads(out)
    assert code == 0 and all(row["same_text"] == 4 for row in record["rows"])
    assert [row["decoder"] for row in record["rows"]][4:] == ["transformers", "transformers-static"]
    assert sorted(record["left_out"]) == sorted(texts[1:])
    assisted = next(row for row in record["rows"] if "assisted" in row["decoder"])
    assert assisted["accepted_length"] > 1


@pytest.mark.parametrize("good_calls", [0, 3], ids=["warming up", "measuring"])
def test_what_torch_cannot_run_is_left_out_with_its_first_line(
    shipped, questions, tmp_path, capsys, monkeypatch, good_calls
):
    def failing(base, max_new_tokens, longest, **options):
        calls, decode = [], decoders.transformers_generate(base, max_new_tokens, **options)

        def run(batch, watch):
            calls.append(1)
            if len(calls) > good_calls:
                raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\n\nSet TORCH_LOGS for more")
            return decode(batch, watch)

        return run

    monkeypatch.setattr(decoders, "transformers_static", failing)
    options = ("--batch", 1, "--temperature", 0, "--repeats", 1, "--no-plots")
    ask = asked(shipped, questions, tmp_path, *options, texts=["transformers-static", "plain"])
    code, out, _ = run(capsys, *ask)
    assert code == 0 and "transformers-static" in out and "No working C++ compiler found" in out
    assert "TORCH_LOGS" not in out and "4 of 4" in out
    code, out, err = run(capsys, *ask, "--reference", "transformers-static")
    assert (code, out) == (2, "") and "the reference 'transformers-static' failed in question.jsonl, batch 1" in err
    assert "No working C++ compiler found" in err.splitlines()[-1] and "Traceback" not in err


def test_prompts_of_other_categories_are_measured_anew(shipped, tmp_path, capsys):
    path, found = tmp_path / "q.jsonl", []
    for category in ("code", "math"):
        path.write_text(json.dumps({"category": category, "prompt": "def f("}) + "\n", "utf8")
        options = ("--batch", 1, "--temperature", 0, "--repeats", 1, "--no-plots", "--json")
        _, out, _ = run(capsys, *asked(shipped, path, tmp_path / "out", *options, texts=["plain"]))
        found += [one["categories"] for one in json.loads(out)["rounds"]]
    assert found == [["code"], ["math"]]


def test_a_file_of_prompts_named_twice_is_refused_with_its_flag(shipped, questions, tmp_path, capsys):
    again = questions.parent / "again" / ".." / questions.name
    again.parent.parent.mkdir()
    code, out, err = run(capsys, *asked(shipped, questions, tmp_path, "--prompts", again))
    assert code == 2 and out == "" and f"--prompts {questions} is given twice" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-d", "eagle3 tree=bush"), "bush"),
        (("--batch", "0"), "--batch 0 must be at least 1"),
        (("--temperature", "hot"), "--temperature hot is not a number"),
        (("--engine", "openvino.py"), "is not FILE=PYTHON"),
        (("--engine", f"{__file__}=/no/python"), "there is no /no/python"),
        (("-d", "openvino"), "openvino"),
        (("-d", "plain refill"), "give --queue, such as"),
        (("--categories", "a"), "give --prompts"),
        (("-d", "eagle9"), "eagle9"),
        (("-d", "auto"), "decoder 'auto' has no head to draft with; name one: 'HEAD auto'"),
        (("-d", "auto", "-d", "eagle3"), "name one: 'eagle3 auto'"),
    ],
)
def test_bad_input_is_one_line(shipped, tmp_path, capsys, words, said):
    code, out, err = run(
        capsys, "bench", shipped, "--num-prompts", 2, "--prompt-tokens", 8, "--no-plots", "--out",
        tmp_path, *words,
    )  # fmt: skip
    assert code == 2 and out == "" and said in err and err.count("\n") == 1
