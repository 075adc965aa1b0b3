"""The command that saves features: its options, what it refuses, and folders of an older format."""

import json

import pytest

from specheads.training.features.index import read_finished_index
from tests.support.command_line import run
from tests.support.paths import ROOT
from tests.support.saved_features import material

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return material(tmp_path_factory.mktemp("material"))


def test_the_command_saves_and_training_reads(folder, tmp_path, capsys, monkeypatch):
    known = [
        "recipes/medusa.yaml", f"base={folder / 'base'}", "base_dtype=float32", "head.num_heads=2", "data.split=train",
        "head.draft_vocab_size=60", f"data.train={folder / 'train.jsonl'}", "data.eval_fraction=0.25",
        "data.max_length=24", "training.bf16=false", "training.max_steps=2", "training.gradient_accumulation_steps=1",
    ]  # fmt: skip
    output = ["--output", tmp_path / "saved"]
    code, out, err = run(capsys, "features", *known, *output)
    assert code == 2 and not out and "give --yes" in err and not (tmp_path / "saved").exists()
    code, out, _ = run(
        capsys, "features", *known, *output, "--yes", "--teacher-probs", "5", "--dtype", "float8_e4m3fn", "--json"
    )
    assert code == 0 and json.loads(out)["rows"] == 14
    index = read_finished_index(tmp_path / "saved")
    assert (index.taps, index.teacher_probs, index.dtype) == ((4,), 5, "float8_e4m3fn")
    rest = [option for option in known if not option.startswith(("base", "data"))]
    code, out, _ = run(
        capsys, "train", *rest, f"features={tmp_path / 'saved'}", f"training.output_dir={tmp_path / 'out'}", "--json"
    )
    assert code == 0 and json.loads(out)["eval_accepted_length"] >= 1
    code, out, _ = run(capsys, "info", tmp_path / "out", "--json")
    assert json.loads(out)["options"]["num_heads"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--taps", "1,x"], "--taps '1,x': expected layer numbers"),
        (["--taps", "1,9"], "--taps (1, 9): expected some of 0 to 4"),
        (["--teacher-probs", "0"], "--teacher-probs 0: expected hidden, none or a number of likeliest tokens"),
        (["--dtype", "int7"], "--dtype int7: expected one of auto"),
        (["--batch-size", "0"], "--batch-size 0 "),
        (["features=there"], "saving them takes base and data"),
        (["base=./nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_saved_is_one_line_and_exit_code_2(words, message, folder, tmp_path, capsys, offline):
    known = ["recipes/medusa.yaml", f"base={folder / 'base'}", f"data.train={folder / 'train.jsonl'}"]
    more = ["data.split=train", "data.eval_fraction=0", "--yes", "--output", tmp_path / "saved"]
    code, out, err = run(capsys, "features", *known, *more, *words)
    assert code == 2 and not out and message in err
    assert not (tmp_path / "saved").exists()


def test_both_helps_have_the_same_options(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "train"))
    import features

    with pytest.raises(SystemExit):
        features.main(["--help"])
    texts = [capsys.readouterr().out.replace("_", "-"), run(capsys, "features", "--help")[1]]
    for option in ("--output", "--taps", "--dtype", "--teacher-probs", "--batch-size", "--shard-mb", "--yes"):
        assert all(option in text for text in texts), option
    assert "accelerate launch" in texts[0]
