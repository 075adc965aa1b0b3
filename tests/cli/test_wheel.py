"""A wheel, installed into an empty folder and used outside the clone: what it holds, and what a newcomer does first."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.command_line import ship
from tests.support.paths import ROOT

RECIPES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml")}
pytestmark = pytest.mark.slow


def command(*args, **options):
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since setuptools builds where the source is, from what an earlier build left there too."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("specheads", "recipes", "tests", "train"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    command(*pip, "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def newcomer(wheel, tmp_path_factory):
    """Run a command of the installed wheel in an empty folder outside the clone, where nothing else is on the path."""
    target, cwd = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("cwd")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    command(*pip, "install", wheel, "--no-deps", "--no-index", "--target", target)
    environment = {**os.environ, "PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}

    def run(*args):
        return command(*args, cwd=cwd, env=environment)

    run.target, run.cwd, run.program = target, cwd, target / "bin" / "specheads"
    return run


def test_the_wheel_holds_the_package_its_recipes_and_its_licence_and_no_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "specheads = specheads.cli.program:main" in archive.read(points).decode()
    assert {name.removeprefix("specheads/") for name in names if name.startswith("specheads/recipes/")} == RECIPES
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "specheads").rglob("*.py")}
    assert sources | {"specheads/py.typed"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"specheads"}
    assert any(re.fullmatch(r"specheads-.*\.dist-info/licenses/LICENSE", name) for name in names)


def test_a_newcomer_trains_generates_and_exports(newcomer):
    where = newcomer(sys.executable, "-c", "import specheads; print(specheads.__file__)")
    assert str(newcomer.target) in where, "not the wheel is used"
    assert "EAGLE-3" in newcomer(newcomer.program, "recipes")
    assert newcomer(sys.executable, "-m", "specheads", "recipes", "medusa") == (
        ROOT / "recipes" / "medusa.yaml"
    ).read_text("utf8")
    ship(newcomer.cwd)
    rows = [{"text": f"def f{i}(x):\n    return x + {i}\n" * 3} for i in range(16)]
    (newcomer.cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    options = (
        "medusa", "base=base", "base_dtype=float32", "head.num_heads=2", "head.draft_vocab_size=60",
        "data.train=rows.jsonl", "data.split=train", "data.eval_fraction=0.25", "data.max_length=32",
        "training.bf16=false", "training.gradient_accumulation_steps=1", "training.eval_strategy=no",
        "parity.prompts=0",
    )  # fmt: skip
    trained = newcomer(newcomer.program, "train", *options, "training.max_steps=2", "training.output_dir=out")
    assert "saved out" in trained
    made = json.loads(
        newcomer(newcomer.program, "generate", "out", "--prompt", "def f", "--max-new-tokens", 8, "--json")
    )
    assert len(made["token_ids"]) == 8
    newcomer(newcomer.program, "export", "out", "served", "--to", "vllm")
    assert (newcomer.cwd / "served" / "README.md").is_file() and list((newcomer.cwd / "served").rglob("*.safetensors"))
    # Several processes, with a launch config out of the wheel and no script of the clone.
    config = newcomer(newcomer.program, "recipes", "accelerate/cpu", "--path").strip()
    said = newcomer(
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", 0,
        "-m", "specheads", "train", *options, "training.max_steps=1", "training.output_dir=two",
        "launch.processes=2",
    )  # fmt: skip
    assert said.count("saved two") == 1


def test_the_demo_of_a_wheel_trains_its_base_first_and_keeps_it(newcomer):
    script = (
        "import sys; from specheads.cli.demo import live, story; live.BASE_MINUTES = 0.02; story.NUM_PROMPTS = 1; "
        "from specheads.cli import program; sys.exit(program.run(sys.argv[1:]))"
    )
    demo = (
        sys.executable, "-c", script, "demo", "--minutes", 0.03,
    )  # fmt: skip
    told = newcomer(*demo)
    assert "No base model came with the package" in told and "every text is the same" in told
    assert "saved runs/demo-base/base" in told and "head, shipped" not in told
    again = newcomer(*demo)
    assert "which an earlier demo trained" in again
    made = newcomer(newcomer.program, "generate", "runs/demo", "--prompt", "import os", "--max-new-tokens", 4, "--json")
    assert len(json.loads(made)["token_ids"]) == 4
    words = "-d plain -d head --batch 1 --temperature 0 --num-prompts 1 --max-new-tokens 4 --repeats 1 --no-plots"
    assert "head" in newcomer(newcomer.program, "bench", "runs/demo", *words.split())
    record = json.loads(newcomer(newcomer.program, "doctor", "--json"))
    assert record["problems"] == [] and "specheads demo" in record["shipped_checkpoints"]
