"""Options by name: what the message of an unknown one says."""

import pickle

import pytest

from specheads.bench.compare.options import BenchOptions
from specheads.options import OptionError, refuse_unknown, require_packages
from specheads.training.distributed.launch import LaunchConfig
from specheads.training.features.plan import SaveOptions
from specheads.training.parity import ParityConfig
from specheads.training.recipe.recipe import RecipeError, read_recipe
from tests.support.command_line import run
from train import features


def test_a_missing_package_is_named_with_the_extra_that_installs_it():
    require_packages("train", "torch")
    with pytest.raises(ImportError, match=r"^this needs nothing_a, nothing_b: pip install 'specheads\[train\]'$"):
        require_packages("train", "nothing_a", "torch", "nothing_b")


def test_known_names_pass_and_the_first_unknown_one_is_named_with_its_nearest():
    refuse_unknown(["rows", "steps"], ["steps", "rows"])
    with pytest.raises(ValueError, match=r"^unknown data option 'run\.row'; did you mean 'run\.rows'\?$"):
        refuse_unknown(["steps", "row", "stesp"], ["steps", "rows"], what="data option", section="run.")


def test_where_no_name_is_near_the_known_ones_are_listed_but_not_without_end():
    with pytest.raises(ValueError, match=r"^unknown option 'zzz'; known: steps, rows$"):
        refuse_unknown(["zzz"], ["steps", "rows"])
    with pytest.raises(ValueError, match=r"known: n0, .*, n23, …$"):
        refuse_unknown(["zzz"], (f"n{i}" for i in range(100)))
    with pytest.raises(ValueError, match=r"unknown option '3'"):
        refuse_unknown([3], ["rows"])  # YAML's keys need not be text


def test_an_option_is_spelled_as_the_front_door_has_it_with_its_value_or_alone():
    error = OptionError("{dtype} and {allow_pickle}: give another {shard_mb} or {law}", dtype="in{law}8",
                        allow_pickle=True, shard_mb=..., law="topk:8")  # fmt: skip
    assert str(error) == "dtype='in{law}8' and allow_pickle=True: give another shard_mb or law='topk:8'"
    flags = {"dtype": "--dtype", "allow_pickle": "--allow-pickle", "shard_mb": "--shard-mb"}
    assert error.render(flags) == "--dtype in{law}8 and --allow-pickle: give another --shard-mb or law='topk:8'"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    of_a_file = "dtype='in{law}8' and --allow-pickle: give another --shard-mb or law='topk:8'"
    assert error.render(flags, {"allow_pickle"}) == of_a_file


@pytest.mark.parametrize(
    ("called", "python", "command", "said"),
    [
        (lambda: SaveOptions("o", batch_size=0), "batch_size=0 must be", "features r.yaml --batch-size 0",
         "--batch-size 0 must be"),
        (lambda: SaveOptions("o", dtype="int7"), "dtype='int7': expected", "features r.yaml --dtype int7",
         "--dtype int7: expected"),
        (lambda: SaveOptions("o", teacher_probs="top"), "teacher_probs='top': expected",
         "features r.yaml --teacher-probs top", "--teacher-probs top: expected"),
        (lambda: BenchOptions(batch=0), "batch=0 must be", "bench x --batch 0", "--batch 0 must be"),
        (lambda: BenchOptions(top_k="y"), "top_k='y' is not a whole", "bench x --top-k y", "--top-k y is not a whole"),
        (lambda: BenchOptions(batch=0), "batch=0 must be", "bench x --recipe s.yaml", "batch=0 must be"),
        (lambda: LaunchConfig(2, "many"), "launch.distributed='many': expected",
         "train t.yaml --dry-run launch.distributed=x", "launch.distributed='x': expected"),
        (lambda: ParityConfig(max_new_tokens=4), "parity.max_new_tokens=4: expected",
         "parity x --data y --max-new-tokens 4", "--max-new-tokens 4: expected"),
        (lambda: ParityConfig(tolerance=2.0), "parity.tolerance=2.0: expected", "parity x --data y --tolerance 2",
         "--tolerance 2.0: expected"),
    ],
)  # fmt: skip
def test_one_error_is_spelled_for_python_and_for_the_command(
    called, python, command, said, tmp_path, capsys, monkeypatch
):
    with pytest.raises(ValueError, match=python):
        called()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("base: x")
    (tmp_path / "s.yaml").write_text("batch: 0")
    (tmp_path / "t.yaml").write_text("base: x\nhead: {kind: medusa}\ndata: {train: x}\ntraining: {output_dir: o}\n")
    code, _, err = run(capsys, *command.split())
    assert code == 2 and err.startswith(f"specheads: {said}"), err


def test_the_options_of_a_recipe_stay_key_value_in_the_command_and_scripts_spell_their_own(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("base: x\nhead: {kind: medusa}\ndata: {train: y}\ntraining: {output_dir: o}\n")
    with pytest.raises(RecipeError, match=r"parity\.tolerance=2"):
        read_recipe("r.yaml", ["parity.tolerance=2"])
    assert run(capsys, "train", "r.yaml", "parity.tolerance=2")[2].startswith("specheads: parity.tolerance=2: expected")
    assert features.main(["r.yaml", "--output", "o", "--batch_size", "0"]) == 2
    assert capsys.readouterr().err.startswith("train/features.py: --batch_size 0 must be")
