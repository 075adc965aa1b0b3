"""The command that saves features: its options, what it refuses, and folders of an older format."""

import json
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from specheads.training.features.dataset import FeatureDataset
from specheads.training.features.index import read_finished_index
from specheads.training.features.shards import file_fingerprint
from tests.support.command_line import run
from tests.support.paths import ROOT
from tests.support.saved_features import dump, material

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
        capsys, "features", *known, *output, "--yes", "--law", "topk:5", "--dtype", "float8_e4m3fn", "--json"
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


def test_a_folder_of_format_1_is_read_and_resumed(folder, tmp_path):
    """It says `law` for teacher_probs, in the index and in the files' names."""
    new, old = tmp_path / "new", tmp_path / "old"
    dump(folder, new, teacher_probs=5)
    shutil.copytree(new, old)
    for path in old.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file({name.replace("topk_", "law_"): t for name, t in tensors.items()}, path, {"text": "0a1b2c3d"})
    record = json.loads((old / "index.json").read_text())
    record["law"] = f"topk:{record.pop('teacher_probs')}"
    files = {
        split: [file_fingerprint(old / entry["file"]) for entry in entries]
        for split, entries in record["files"].items()
    }
    (old / "index.json").write_text(json.dumps({**record, "format": 1, "files": files}))
    kept = [{name: t.tolist() for name, t in row.items()} for row in FeatureDataset(new, (1,))]
    assert [{name: t.tolist() for name, t in row.items()} for row in FeatureDataset(old, (1,))] == kept
    (old / "train-00001.safetensors").unlink()
    assert dump(folder, old, teacher_probs="topk:5").made == 1
    assert [{name: t.tolist() for name, t in row.items()} for row in FeatureDataset(old, (1,))] == kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--taps", "1,x"], "--taps '1,x': expected layer numbers"),
        (["--taps", "1,9"], "--taps (1, 9): expected some of 0 to 4"),
        (["--teacher-probs", "0"], "--teacher-probs 0: expected hidden, none or a number of likeliest tokens"),
        (["--law", "topk:0"], "--teacher-probs topk:0: expected"),
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
    for option in ("--output", "--taps", "--dtype", "--teacher-probs", "--law", "--batch-size", "--shard-mb", "--yes"):
        assert all(option in text for text in texts), option
    assert "accelerate launch" in texts[0]
