"""The command line: help with examples, bad input in one line with exit code 2, running as a program."""

import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import typer

import specheads_cli as cli
from tests.support.command_line import run
from tests.support.paths import ROOT

COMMANDS = (
    "doctor",
    "demo",
    "train",
    "features",
    "generate",
    "chat",
    "evaluate",
    "parity",
    "calibrate",
    "tune",
    "info",
    "recipes",
    "export",
    "import",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_shows_examples_that_parse(command, capsys):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    examples = [line.split("|")[-1].strip() for line in out.partition("Examples:")[2].partition("\n\n")[0].splitlines()]
    own = [line for line in examples if line.startswith("specheads ")]
    assert len(own) >= 2 and all(line.split()[1] == command for line in own)
    for line in own:
        words = shlex.split(line.partition(" > ")[0])[2:]
        group = typer.main.get_command(cli.app)
        group.commands[command].make_context(command, words)  # raises on an option that does not exist


def test_the_command_alone_lists_the_commands_and_says_its_version(capsys):
    code, out, _ = run(capsys)
    assert code == 0 and all(command in out for command in COMMANDS)
    assert run(capsys, "--version")[1].startswith("specheads 0.")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate {head} --prompt a --max-new-tokens -1", "max-new-tokens"),
        ("generate {head} --prompt a --max-new-tokens many", "max-new-tokens"),
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
        ("generate {head} --prompt ''", "no prompt"),
        ("generate {head} --prompt a --prompt-file b", "not both"),
        ("generate {head} --prompt-file {tmp}/absent.txt", "absent.txt"),
        ("generate {head} --prompt-file {tmp}/latin.txt", "not UTF-8"),
        ("generate {head} --prompt-file {tmp}/empty.jsonl", "empty.jsonl is empty"),
        ("generate {tmp}/absent --prompt a", "absent"),
        ("generate {base} --prompt a --draft head", "there is no head to draft with"),
        ("generate {head} --prompt a --tree bush:3", "--tree 'bush:3': unknown tree 'bush'; expected chain:DEPTH"),
        ("generate {head} --prompt a --tree chain:x", "depth='x' "),
        ("generate {head} --prompt a --tree chain:0", "depth=0"),
        ("generate {head} --prompt a --tree dynamic:60,7,9,1", "dynamic:60,7,9,1"),
        ("generate {head} --prompt a --tree dynamic:900,1,2", "budget=900"),
        ("generate {head} --prompt a --tree static:1", "2 or more"),
        ("generate {head} --prompt a --tree chain:9", "9 deep"),
        ("generate {head} --prompt a --tree chain:2 --draft none", "one of them"),
        ("generate {head} --prompt a --dtype int7", "int7"),
        ("generate {head} --prompt a --device moon", "moon"),
        ("generate {head} --prompt a --base {tmp}/nowhere", "nowhere"),
        ("generate {head} --prompt a --what", "--what"),
        ("chat {tmp}/absent", "absent"),
        ("chat {head} --accept exakt", "did you mean 'exact'"),
        ("chat {head} --tree bush:3", "unknown tree 'bush'"),
        ("chat {head} --tree chain:9", "9 deep"),
        ("chat {head} --assistant {tmp}/nowhere", "nowhere"),
        ("chat {base} --base {base}", "--base"),
        ("evaluate {head} --prompts {tmp}/absent.jsonl", "absent.jsonl"),
        ("evaluate {head} --prompts {tmp}/empty.jsonl", "empty.jsonl holds no prompts"),
        ("evaluate {head} --prompts {tmp}/latin.txt", "latin.txt, line 1: byte 0xe9 at column 4 is not UTF-8"),
        ("calibrate {head} --data {tmp}/ids.jsonl", "row 2 of {tmp}/ids.jsonl: token 258 is outside the base's"),
        ("parity {head} --data {tmp}/ids.jsonl", "row 2 of {tmp}/ids.jsonl: token 258 is outside the base's"),
        ("calibrate {head} --data {tmp}/absent.jsonl", "absent.jsonl"),
        ("calibrate {head} --data {tmp}/emty.jsonl", "emty.jsonl' (did you mean {tmp}/empty.jsonl?)"),
        ("parity {head} --data {tmp}/empty.jsonl", "empty.jsonl is empty"),
        ("evaluate {head} --num-prompts 0", "num-prompts"),
        ("evaluate {tmp}/absent", "absent"),
        ("generate {base} --prompt a --assistant {head}", "{head} is a draft head, not a language model; give the"),
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
        ("generate {base} --prompt a --draft cascade: --k-matrix [[5]]", "drafter '' lacks a name: give model:PATH"),
        ("generate {base} --prompt a --draft cascade:lookup+ --k-matrix [[5,8],[0,8]]", "drafter '' lacks a name"),
        ("info {tmp}/absent", "absent "),
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
        ("train eagle3 --learning_rate 1e-3", "did you mean training.learning_rate=1e-3? A recipe's options are given"),
        ("train eagle3 --learning-rate=1e-3", "did you mean training.learning_rate=1e-3?"),
        ("train eagle3 --lr 1e-3", "did you mean training.learning_rate=1e-3?"),
        ("train --bf16 --dry-run eagle3", "did you mean training.bf16=…?"),
        ("train eagle3 --procesess 2", "did you mean --processes?"),
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
        ("bench -d cascade:lookup+ngram", "a cascade takes k=…"),
        ("train {tmp}/absent.yaml", "absent.yaml is neither a file"),
        ("train {tmp}/latin.txt nonsense", "'nonsense' is not KEY=VALUE"),
        ("demo --checkpoints {tmp}", "no base model at"),
        ("demo --minutes -2", "minutes"),
        ("demo --checkpoints {shipped} --output {tmp}/latin.txt", "{tmp}/latin.txt is a file, not a folder"),
        ("demo --checkpoints {shipped} --num-prompts 99", "99 prompts asked for"),
        ("deom", "No such command"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(line, said, shipped, tmp_path, capsys, monkeypatch):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "none").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trainer_state.json").touch()
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [5, 6]}\n{"input_ids": [5, 258]}\n')
    paths = {"head": shipped / "medusa", "base": shipped / "base", "tmp": tmp_path, "shipped": shipped}
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    code, out, err = run(capsys, *shlex.split(line.format(**paths)))
    own = [text for text in err.splitlines() if text.startswith("specheads: ")]
    assert code == 2 and not out
    assert len(own) == 1 and said.format(**paths) in own[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "line", ["generate {bare} --prompt a", "generate {head} --base {bare} --prompt a", "train medusa {rows}",
             "features medusa {rows} head.draft_vocab_size=null --output {bare}/out"],
)  # fmt: skip
def test_a_model_without_a_tokenizer_is_named(line, shipped, tmp_path, capsys):
    """As model.save_pretrained() alone leaves it."""
    bare = shutil.copytree(shipped / "base", tmp_path / "bare", ignore=shutil.ignore_patterns("*tokenizer*"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    rows = f"base={bare} data.train={tmp_path}/rows.jsonl training.bf16=false training.output_dir={tmp_path}/out"
    code, out, err = run(capsys, *shlex.split(line.format(bare=bare, head=shipped / "medusa", rows=rows)))
    own = [text for text in err.splitlines() if text.startswith("specheads: ")]
    assert code == 2 and not out and len(own) == 1
    assert f"{bare} has no tokenizer that can be loaded: save one beside the model" in own[0]


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
    for command in (f"generate --prompt a {head}", f"evaluate {head}", f"calibrate --data rows.jsonl {head}",
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
        f"import sys, specheads_cli; codes = [specheads_cli.run(args) for args in {asked}]; "
        "sys.exit(any(codes) or not {'torch', 'transformers', 'specheads'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_the_program_ends_with_the_exit_code_and_one_line():
    """Of a mistake that is found before torch is imported; run() is the same for all others."""
    command = [sys.executable, "-m", "specheads_cli", "inffo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "specheads: No such command 'inffo'. Did you mean 'info'?\n"


PROGRAMS = {
    "specheads_cli": ["-m", "specheads_cli", "info", "somewhere"],
    "specheads": ["-m", "specheads", "info", "somewhere"],  # Python imports the package before its __main__
    "heads": ["train/heads.py", "eagle3"],
    "features": ["train/features.py", "eagle3", "--output", "nowhere"],
    "self_distill": ["train/self_distill.py", "--base", "a", "--output", "b"],
    "bigram": ["train/bigram.py", "--base", "a", "--output", "b"],
    "base_model": ["train/base_model.py", "--output_dir", "a"],
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
