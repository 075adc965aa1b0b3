"""The command line: help with examples, bad input in one line with exit code 2, running as a program."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
import typer

from specheads.cli import program as cli
from specheads.cli.options.decode import GenerateOptions
from specheads.cli.options.measure import TuneOptions
from specheads.cli.options.training import TrainOptions
from tests.support.command_line import run
from tests.support.paths import ROOT

PARSERS = typer.main.get_command(cli.app).commands
COMMANDS = [*PARSERS]
DATACLASSES = [name for name in COMMANDS if name not in ("bench",)]


def test_every_help_shows_examples_that_parse_and_plain_names(capsys, monkeypatch):
    """No type of Python, no argument spelled twice, and no model that a wheel lacks."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        code, out, _ = run(capsys, command, "--help")
        assert code == 0 and not re.search(r"<\w|\[\[[A-Z]|\{[A-Z]|default: \(", out)
        assert "checkpoints/" not in out and max(map(len, out.splitlines())) <= 80
        block = out.partition("Examples:")[2].partition("\n\n")[0]
        examples = [line.split("|")[-1].strip() for line in block.replace("\\\n", " ").splitlines()]
        ours = [line for line in examples if line.startswith("specheads ")]
        assert len(ours) >= 2 and all(line.split()[1] == command for line in ours)
        for line in ours:
            words = shlex.split(re.split(" [<>] ", line)[0])[2:]
            PARSERS[command].make_context(command, words)  # raises on an option that does not exist
    usages = {"train": "RECIPE [KEY=VALUE]...", "info": "PATH", "tune": "MODEL...", "export": "MODEL OUT"}
    for command, usage in usages.items():
        first = run(capsys, command, "--help")[1].splitlines()[0]
        assert first == f"Usage: specheads {command} [OPTIONS] {usage}"


def test_the_command_alone_lists_the_commands_whole_and_says_its_version(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys)
    listed = out.partition("Commands:\n")[2].splitlines()
    assert code == 0 and [line.split()[0] for line in listed] == COMMANDS
    assert COMMANDS[0] == "doctor" and COMMANDS.index("train") < COMMANDS.index("generate") < COMMANDS.index("export")
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= 80 for line in listed)
    assert "a clone of the repository checkpoints/eagle3" in " ".join(out.split())
    assert run(capsys, "--version")[1].startswith("specheads 0.")


def test_an_option_is_declared_once_for_python_the_command_and_the_record():
    """What a command parses are the fields of its dataclass, with their defaults."""
    kinds = {"generate": GenerateOptions, "tune": TuneOptions, "train": TrainOptions}
    for name, kind in kinds.items():
        declared = {field.name: field for field in fields(kind)}
        params = {param.name: param for param in PARSERS[name].params}
        assert set(params) == set(declared)
        for key, field in declared.items():
            assert params[key].required == (field.default is MISSING) and params[key].help == field.metadata["help"]
            assert field.default is MISSING or params[key].default == field.default
    record = GenerateOptions(model="m", seed=3).record()
    assert record["seed"] == 3 and record["draft"] == "auto" and json.dumps(record) and "as_json" not in record
    # 150 until `distill` (a script before), `adapt`, `report` and `--quantize` of five commands came: 23, 15, 3, 5.
    assert sum(len(parser.params) for parser in PARSERS.values()) <= 202


BAD_INPUT = [
    ("generate {head} --prompt a --max-new-tokens -1", "max-new-tokens"),
    ("generate {head} --prompt a --temperature -0.5", "temperature"),
    ("generate {head} --prompt a --top-p 0.9", "--temperature above 0"),
    ("generate {head}", "no prompt"),
    ("generate", "Missing argument 'MODEL'; usage: specheads generate [OPTIONS] MODEL"),
    ("generate {head} a", "unexpected extra argument(s) (a); usage: specheads generate [OPTIONS] MODEL"),
    ("generate {head} --prompt a --seed x", "'--seed': Input should be a valid integer, unable"),
    ("generate {head} --prompt a --seed=x", "not 'x'"),
    ("generate https://huggingface.co/org/model --prompt a", "is an address; give a folder or a hub id"),
    ("generate {head}/config.json --prompt a", "config.json is a file; give the folder of a checkpoint"),
    ("help", "No such command 'help'; usage: specheads [OPTIONS] COMMAND"),
    ("generate {base} --prompt a --draft head", "there is no head to draft with"),
    ("generate {head} --prompt a --tree bush:3", "tree 'bush:3': unknown tree 'bush'; expected chain:DEPTH"),
    ("generate {head} --prompt a --tree chain:9", "9 deep"),
    ("generate {head} --prompt a --tree chain:2 --draft none", "one of them"),
    ("generate {head} --prompt a --dtype int7", "int7"),
    ("generate {head} --prompt a --device moon", "moon"),
    ("generate {head} --prompt a --base {tmp}/nowhere", "nowhere"),
    ("generate {head} --prompt a --what", "--what"),
    ("chat {head} --accept exakt", "did you mean 'exact'"),
    ("chat {head} --tree chain:9", "9 deep"),
    ("chat {head} --draft model:{tmp}/nowhere", "nowhere"),
    ("chat {base} --base {base}", "--base"),
    ("bench {head} --no-plots --prompts {tmp}/absent.jsonl", "absent.jsonl"),
    ("bench {head} --no-plots --prompts {tmp}/empty.jsonl", "empty.jsonl holds no prompts"),
    ("bench {head} --no-plots --prompts {tmp}/latin.txt", "latin.txt, line 1: byte 0xe9 at column 4 is not UTF-8"),
    ("calibrate {head} --data {tmp}/ids.jsonl", "row 2 of {tmp}/ids.jsonl: token 258 is outside the base's"),
    ("parity {head} --data {tmp}/ids.jsonl", "row 2 of {tmp}/ids.jsonl: token 258 is outside the base's"),
    ("calibrate {head} --data {tmp}/emty.jsonl", "emty.jsonl' (did you mean {tmp}/empty.jsonl?)"),
    ("parity {head} --data {tmp}/empty.jsonl", "empty.jsonl is empty"),
    ("bench {head} --num-prompts 0", "num-prompts"),
    ("generate {base} --prompt a --draft model:{head}", "{head} is a draft head, not a language model"),
    ("generate {head} --prompt a --base {head}", "{head} is a draft head, not a language model"),
    ("train medusa --dry-run base={head}", "{head} is a draft head, not a language model"),
    (
        "train medusa training.bf16=false training.output_dir={tmp}/out base={head} data.train={tmp}/ids.jsonl",
        "{head} is a draft head, not a language model",
    ),
    ("features medusa base={head} data.train={tmp}/ids.jsonl --output {tmp}/out", "{head} is a draft head, not a"),
    (
        "generate {base} --prompt a --draft model:",
        "drafter 'model:' lacks a name: give model:PATH, a checkpoint, or ",
    ),
    ("generate {base} --prompt a --draft cascade:", "drafter '' lacks a name: give model:PATH"),
    ("generate {base} --prompt a --draft cascade:lookup+", "drafter '' lacks a name"),
    ("info {tmp}/latin.txt", "latin.txt is a file; give the folder of a checkpoint"),
    (
        "train {tmp}/latin.txt a=1",
        "latin.txt is not UTF-8 text: 'utf-8' codec can't decode byte 0xe9 in position 3",
    ),
    (
        "bench --recipe {tmp}/latin.txt",
        "latin.txt is not UTF-8 text: 'utf-8' codec can't decode byte 0xe9 in position 3",
    ),
    ("generate {tmp}/none --prompt a", "{tmp}/none holds no config.json"),
    ("generate '' --prompt a", "'', an empty name, holds no config.json"),
    ("train medusa --dry-run base={tmp}/none", "{tmp}/none holds no config.json"),
    ("tune {head} --output {tmp}/latin.txt/a.json", "{tmp}/latin.txt is a file, not a folder"),
    ("tune {head} --output {tmp}/none", "--output {tmp}/none is a folder: give a file"),
    ("tune {head} --search {tmp}/none", "--search {tmp}/none is a folder: give a file"),
    ("tune {head} --search {tmp}/latin.txt/a", "--search {tmp}/latin.txt/a: {tmp}/latin.txt is a file"),
    ("bench {head} --record {tmp}/none", "--record {tmp}/none is a folder: give a file"),
    ("bench --out {tmp}/latin.txt", "--out {tmp}/latin.txt: {tmp}/latin.txt is a file, not a folder"),
    (
        "bench {head} --task humaneval:{tmp}/ids.jsonl --no-plots --out {tmp}/bench",
        "allow it with --run-code, best in a sandbox",
    ),
    ("info {base}", "for a base model train one, `specheads train eagle3 base={base}`"),
    ("info {shipped}/latin", "{shipped}/latin is not a directory"),
    (
        "curves {shipped}",
        "{shipped} is no training run: it has no trainer_state.json; give the training.output_dir",
    ),
    ("curves {tmp}/nome", "no such folder: {tmp}/nome (did you mean {tmp}/none?)"),
    ("curves {tmp}", "did you mean {tmp}/run?"),
    ("train eagle3 --lr 1e-3", "did you mean training.learning_rate=1e-3? A recipe's options are given"),
    ("train eagle3 --learning_rat 1e-3", "did you mean training.learning_rate=1e-3?"),
    ("train eagle3 --learning_rate", "--learning_rate needs a value: --learning_rate VALUE, or training.learning_"),
    ("train eagle3 --learning_rate base=a", "--learning_rate needs a value"),
    ("distill --base a --output b --soource c", "No such option: --soource"),
    ("train eagle3 --dry-rum", "did you mean --dry-run?"),
    ("train eagle3 --what", "no such option: --what"),
    ("features eagle3 --data rows.jsonl", "did you mean data.train=rows.jsonl?"),
    (
        "train eagle3 base={base} data.train={tmp}/ids.jsonl training.output_dir={tmp}/latin.txt",
        "latin.txt is a file",
    ),
    ("bench -d egle3", "unknown decoder 'egle3'; did you mean 'eagle3'?"),
    ("bench -d plian", "did you mean 'plain'?"),
    ("bench -d lokup", "did you mean 'lookup'?"),
    ("bench --reference transfomers", "did you mean 'transformers'?"),
    ("bench {shipped} -d medsua", "did you mean 'medusa'?"),
    ("train {tmp}/absent.yaml", "absent.yaml is neither a file"),
    ("train {tmp}/latin.txt nonsense", "'nonsense' is not KEY=VALUE"),
    ("demo --checkpoints {tmp}", "no base model at"),
    ("demo --minutes -2", "minutes"),
    ("demo --checkpoints {shipped} --output {tmp}/latin.txt", "{tmp}/latin.txt is a file, not a folder"),
    ("deom", "No such command"),
]


def test_bad_input_is_one_line_on_stderr_and_exit_code_2(shipped, tmp_path, capsys, monkeypatch):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "none").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trainer_state.json").touch()
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [5, 6]}\n{"input_ids": [5, 258]}\n')
    paths = {"head": shipped / "medusa", "base": shipped / "base", "tmp": tmp_path, "shipped": shipped}
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    wrong = []
    for line, message in BAD_INPUT:
        code, out, err = run(capsys, *shlex.split(line.format(**paths)))
        ours = [text for text in err.splitlines() if text.startswith("specheads: ")]
        fits = code == 2 and not out and len(ours) == 1 and message.format(**paths) in ours[0]
        if not fits or "Traceback" in err:
            wrong.append((line, message, code, out, ours))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_model_without_a_tokenizer_is_named(shipped, tmp_path, capsys):
    """As model.save_pretrained() alone leaves it."""
    bare = shutil.copytree(shipped / "base", tmp_path / "bare", ignore=shutil.ignore_patterns("*tokenizer*"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    rows = f"base={bare} data.train={tmp_path}/rows.jsonl training.bf16=false training.output_dir={tmp_path}/out"
    for line in (
        f"generate {bare} --prompt a", f"generate {shipped}/medusa --base {bare} --prompt a", f"train medusa {rows}",
        f"features medusa {rows} head.draft_vocab_size=null --output {bare}/out",
    ):  # fmt: skip
        code, out, err = run(capsys, *shlex.split(line))
        ours = [text for text in err.splitlines() if text.startswith("specheads: ")]
        assert code == 2 and not out and len(ours) == 1, line
        assert f"{bare} has no tokenizer that can be loaded: save one beside the model" in ours[0]


def test_debug_shows_the_traceback(shipped, capsys, monkeypatch):
    with pytest.raises(ValueError, match="unknown tree"):
        cli.run(["--debug", "generate", str(shipped / "medusa"), "--prompt", "a", "--tree", "bush"])
    monkeypatch.setenv("SPECHEADS_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown tree"):
        cli.run(["generate", str(shipped / "medusa"), "--prompt", "a", "--tree", "bush"])
    for off in ("", "0", "False", "no"):
        monkeypatch.setenv("SPECHEADS_DEBUG", off)
        assert cli.run(["generate", str(shipped / "medusa"), "--prompt", "a", "--tree", "bush"]) == 2


def test_a_shipped_head_where_none_are_is_told_of_the_demo(tmp_path, monkeypatch, capsys):
    """As in a folder outside the clone, of a wheel."""
    monkeypatch.chdir(tmp_path)
    head = "checkpoints/eagle3"
    for command in (f"generate --prompt a {head}", f"bench {head}", f"calibrate --data rows.jsonl {head}",
                    "train embedded/eagle3 --dry-run"):  # fmt: skip
        source = "checkpoints/base" if "train" in command else head
        code, out, said = run(capsys, *command.split())
        assert (code, out) == (2, "")
        assert said.startswith(f"specheads: there is no {source} here") and "`specheads demo` trains a head" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_a_closed_stream_is_an_empty_one(closed, shipped, capsys, monkeypatch):
    """As `<&-` and `>&-` leave it: None."""
    given = ["--prompt", "a", "--max-new-tokens", "2"] if closed == "stdout" else []
    monkeypatch.setattr(sys, "argv", ["specheads", "generate", str(shipped / "medusa"), *given])
    monkeypatch.setattr(sys, closed, None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    getattr(sys, closed).close()
    assert ended.value.code == (2 if closed == "stdin" else 0)
    assert ("no prompt" if closed == "stdin" else "2 tokens in") in capsys.readouterr().err


def test_help_waits_for_neither_torch_nor_transformers():
    asked = [["--help"], *([command, "--help"] for command in COMMANDS)]
    script = (
        f"import sys; from specheads.cli.program import run; codes = [run(args) for args in {asked}]; "
        "sys.exit(any(codes) or not {'torch', 'transformers', 'numpy'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_the_program_ends_with_the_exit_code_and_one_line():
    """Of a mistake that is found before torch is imported; run() is the same for all others."""
    command = [sys.executable, "-m", "specheads", "inffo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "specheads: No such command 'inffo'. Did you mean 'info'?\n"


PROGRAMS = {
    "specheads": ["-m", "specheads", "info", "somewhere"],
    "heads": ["train/heads.py", "eagle3"],
    "distill": ["-m", "specheads", "distill", "--base", "a", "--output", "b"],
}


@pytest.mark.parametrize("words", PROGRAMS.values(), ids=PROGRAMS)
def test_ctrl_c_while_torch_is_imported_is_one_line(words, tmp_path):
    """However the import takes it: here as numpy may, which loses the interrupt and fails on something else."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt: raise ImportError('cannot load module more than once per process') from None\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=environment, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
    )  # fmt: skip
    program = words[0] if words[0].endswith(".py") else "specheads"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{program}: stopped\n")


def test_every_script_listens_before_it_imports_torch():
    for script in sorted((ROOT / "train").glob("*.py")):
        text = script.read_text("utf8")
        assert f'    listen("train/{script.name}")\n    sys.exit(main())' in text, script
        assert not re.search(r"^(import|from) (torch|transformers)", text, re.MULTILINE), script
