"""The command line: help with examples, bad input in one line with exit code 2, and what each command prints."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specheads_cli as cli
from specheads import console as terminal
from specheads.bench import decoders as racers
from specheads.convert import convert
from specheads.demo import story
from specheads.text import TextPieces
from tests.conftest import tiny_llama

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A folder as checkpoints/ is: a tiny random base with a byte tokenizer, and two heads for it."""
    folder = tmp_path_factory.mktemp("shipped")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|pad|>"]
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token=special[0], eos_token=special[0],
                                        pad_token=special[1])  # fmt: skip
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"
    base = tiny_llama(vocab_size=len(vocab), num_hidden_layers=4, eos_token_id=0, bos_token_id=0, pad_token_id=1)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "base" / "held_out.txt").write_text("argparse.py\nast.py\nbase64.py\n", "utf8")
    base.name_or_path = str(folder / "base")
    convert(base, "medusa", num_heads=2).save_pretrained(folder / "medusa")
    convert(base, "eagle3", steps=2).save_pretrained(folder / "eagle3")
    return folder


def run(capsys, *args):
    """Exit code, stdout and stderr of one command in this process."""
    code = cli.run([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


COMMANDS = ("demo", "train", "generate", "evaluate", "calibrate", "info")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_shows_examples_that_parse(command, capsys):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    examples = [line.split("|")[-1].strip() for line in out.partition("Examples:")[2].partition("\n\n")[0].splitlines()]
    own = [line for line in examples if line.startswith("specheads ")]
    assert len(own) >= 2 and all(line.split()[1] == command for line in own)
    for line in own:
        words = shlex.split(line.partition(" > ")[0])[2:]
        group = cli.typer.main.get_command(cli.app)
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
        ("generate", "MODEL"),
        ("generate {head} --prompt ''", "no prompt"),
        ("generate {head} --prompt a --prompt-file b", "not both"),
        ("generate {head} --prompt-file {tmp}/absent.txt", "absent.txt"),
        ("generate {head} --prompt-file {tmp}/latin.txt", "not UTF-8"),
        ("generate {tmp}/absent --prompt a", "absent"),
        ("generate {base} --prompt a", "not the config of a draft head"),
        ("generate {head} --prompt a --tree bush:3", "'bush:3' is no tree; expected chain:DEPTH"),
        ("generate {head} --prompt a --tree chain:x", "'x' is not whole numbers"),
        ("generate {head} --prompt a --tree chain:0", "depth=0"),
        ("generate {head} --prompt a --tree dynamic:60,7", "is no tree"),
        ("generate {head} --prompt a --tree dynamic:900,1,2", "budget=900"),
        ("generate {head} --prompt a --tree static:1", "2 or more"),
        ("generate {head} --prompt a --tree chain:9", "9 deep"),
        ("generate {head} --prompt a --tree chain:2 --no-draft", "one of them"),
        ("generate {head} --prompt a --dtype int7", "int7"),
        ("generate {head} --prompt a --device moon", "moon"),
        ("generate {head} --prompt a --base {tmp}/nowhere", "nowhere"),
        ("generate {head} --prompt a --what", "--what"),
        ("evaluate {head} --prompts {tmp}/absent.jsonl", "absent.jsonl"),
        ("evaluate {head} --num-prompts 0", "num-prompts"),
        ("evaluate {tmp}/absent", "absent"),
        ("info {tmp}/absent", "absent is not a directory"),
        ("info {base}", "not the config of a draft head"),
        ("train {tmp}/absent.yaml", "absent.yaml is not a file"),
        ("train {tmp}/latin.txt nonsense", "'nonsense' is not KEY=VALUE"),
        ("demo --checkpoints {tmp}", "no base model at"),
        ("demo --minutes -2", "minutes"),
        ("demo --checkpoints {shipped} --num-prompts 99", "99 prompts asked for"),
        ("deom", "No such command"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(line, said, shipped, tmp_path, capsys, monkeypatch):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    places = {"head": shipped / "medusa", "base": shipped / "base", "tmp": tmp_path, "shipped": shipped}
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    code, out, err = run(capsys, *shlex.split(line.format(**places)))
    own = [text for text in err.splitlines() if text.startswith("specheads: ")]
    assert code == 2 and not out
    assert len(own) == 1 and said in own[0]
    assert "Traceback" not in err


def test_debug_shows_the_traceback(shipped, capsys, monkeypatch):
    with pytest.raises(ValueError, match="is no tree"):
        cli.run(["--debug", "generate", str(shipped / "medusa"), "--prompt", "a", "--tree", "bush"])
    monkeypatch.setenv("SPECHEADS_DEBUG", "1")
    with pytest.raises(ValueError, match="is no tree"):
        cli.run(["generate", str(shipped / "medusa"), "--prompt", "a", "--tree", "bush"])


@pytest.mark.parametrize("tree", ["chain:2", "comb:2,3", "dynamic:9,2,3", "static", "static:8", "sampled:2,1"])
@pytest.mark.parametrize("head", ["medusa", "eagle3"])
def test_generate_gives_the_same_text_whatever_the_tree(head, tree, shipped, capsys):
    ask = ("generate", shipped / head, "--prompt", "def f(", "--max-new-tokens", 16, "--json")
    plain = json.loads(run(capsys, *ask, "--no-draft")[1])
    code, out, _ = run(capsys, *ask, "--tree", tree)
    record = json.loads(out)
    assert code == 0 and record["text"] == plain["text"] and record["token_ids"] == plain["token_ids"]
    assert plain["draft_depths"] == [0] * 16 and record["statistics"]["drafted"] > 0
    assert sum(depth > 0 for depth in record["draft_depths"]) == record["statistics"]["accepted"]


@pytest.mark.parametrize("how", [["--stream"], ["--no-stream"]])
def test_the_text_goes_to_stdout_whole_and_plain_without_a_terminal(how, shipped, capsys):
    ask = ("generate", shipped / "eagle3", "--prompt", "x = ", "--max-new-tokens", 24)
    wanted = json.loads(run(capsys, *ask, "--json")[1])["text"]
    code, out, err = run(capsys, *ask, *how)
    assert code == 0 and out == wanted + "\n"
    assert "24 tokens in" in err and "accepted length" in err and not CONTROL.search(err)


def test_a_prompt_comes_from_a_file_or_from_stdin_too(shipped, tmp_path, capsys, monkeypatch):
    ask = ("generate", shipped / "medusa", "--max-new-tokens", 8, "--json")
    given = run(capsys, *ask, "--prompt", "import os\n")[1]
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n", "utf8")
    assert json.loads(run(capsys, *ask, "--prompt-file", file)[1])["text"] == json.loads(given)["text"]
    with open(file) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert json.loads(run(capsys, *ask)[1])["text"] == json.loads(given)["text"]


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


def test_evaluate_reports_the_same_figures_as_a_table_and_as_json(shipped, tmp_path, capsys):
    prompts = tmp_path / "p.txt"
    prompts.write_text("def f(x):\nclass A\n", "utf8")
    ask = ("evaluate", shipped / "eagle3", "--prompts", prompts, "--max-new-tokens", 12, "--repeats", 1)
    code, out, err = run(capsys, *ask, "--json")
    record = json.loads(out)
    assert code == 0 and not CONTROL.search(err)
    assert list(record["decoders"]) == ["transformers generate", "our loop, no drafts", "eagle3 head"]
    assert all(row["identical"] for row in record["decoders"].values())
    assert record["decoders"]["our loop, no drafts"]["accepted_length"] == 1
    assert record["environment"]["torch"] == torch.__version__ and record["num_prompts"] == 2
    code, out, _ = run(capsys, *ask, "--tree", "chain:1")
    assert code == 0 and not CONTROL.search(out)
    assert "eagle3 head" in out and "transformers generate" in out and torch.__version__ in out


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


def test_info_alone_gives_versions_and_heads(capsys):
    record = json.loads(run(capsys, "info", "--json")[1])
    assert record["torch"] == torch.__version__ and record["heads"] == ["medusa", "eagle", "eagle3"]


def test_train_hands_the_recipe_and_its_overrides_on(shipped, tmp_path, capsys):
    data, recipe = tmp_path / "rows.jsonl", tmp_path / "recipe.yaml"
    data.write_text("".join(json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n"}) + "\n" for i in range(8)))
    recipe.write_text(
        f"base: {shipped / 'base'}\nhead: {{kind: medusa, num_heads: 3}}\ndata: {{train: {data}, max_length: 32}}\n"
        f"training: {{output_dir: {tmp_path / 'out'}, max_steps: 1, report_to: none, per_device_train_batch_size: 2}}\n"
    )
    code, out, _ = run(capsys, "train", recipe, "head.num_heads=1")
    assert code == 0 and f"saved {tmp_path / 'out'}" in out
    assert json.loads(run(capsys, "info", tmp_path / "out", "--json")[1])["options"]["num_heads"] == 1
    code, _, err = run(capsys, "train", recipe, "training.max_stesp=1")
    assert code == 2 and "max_steps" in err


def test_the_demo_runs_end_to_end(shipped, tmp_path, capsys):
    record = tmp_path / "figures" / "demo.json"
    code, out, err = run(
        capsys, "demo", "--checkpoints", shipped, "--minutes", 0.05, "--num-prompts", 2, "--max-new-tokens", 12,
        "--output", tmp_path / "head", "--json", record,
    )  # fmt: skip
    assert code == 0, out + err
    assert not CONTROL.search(out)
    figures = json.loads(record.read_text("utf8"))
    assert figures["same_text"] is True and "every text is the same" in out
    names = ["transformers generate", "our loop, no drafts", "Medusa", "EAGLE-3", "EAGLE-3, just trained"]
    assert list(figures["decoders"]) == names and all(name in out for name in names)
    assert "no EAGLE-1 head at" in out  # none was made here
    assert figures["training"]["steps"] >= 1 and figures["training"]["tokens"] > 0
    assert json.loads(run(capsys, "info", tmp_path / "head", "--json")[1])["kind"] == "eagle3"


def test_the_demo_notices_a_text_that_differs(shipped, tmp_path, capsys, monkeypatch):
    real = racers.drafted

    def wrong(model, length, **kwargs):
        decode = real(model, length, **kwargs)

        def run(batch, watch):
            out = decode(batch, watch)
            out.tokens[0][3] += 1
            return out

        return run

    monkeypatch.setattr(racers, "drafted", wrong)
    code, out, _ = run(
        capsys, "demo", "--checkpoints", shipped, "--minutes", 0.02, "--num-prompts", 1, "--max-new-tokens", 8,
        "--output", tmp_path / "head",
    )  # fmt: skip
    assert code == 1 and "not every text is the same" in out and "from token 4 on" in out


def test_the_demo_notices_a_restored_head_that_writes_otherwise(shipped, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(story, "show_elsewhere", lambda *args: [[5] * 8])
    code, out, _ = run(
        capsys, "demo", "--checkpoints", shipped, "--minutes", 0.02, "--num-prompts", 1, "--max-new-tokens", 8,
        "--output", tmp_path / "head",
    )  # fmt: skip
    assert code == 1 and "not every text is the same: the restored process wrote other text" in out


class Pieces:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, **kwargs):
        return bytes(ids).decode("utf8", errors="replace")


class Screen:
    """A console's stand-in that notes what is written in which style."""

    is_terminal = True

    def __init__(self):
        self.written = []
        self.file = self

    def print(self, text, **kwargs):
        self.written.append((text.plain, str(text.style)))

    def flush(self):
        pass


def test_each_token_is_coloured_by_its_draft_depth():
    screen = Screen()
    stream = terminal.TokenStream(screen, Pieces(), colored=True)
    for step in (b"prompt", b"a", b"bcd", b"ef"):
        stream.put(torch.tensor(list(step)))
    stream.end()
    stream.close(accepted=1)
    assert stream.depths == [0, 1, 2, 0, 1, 0]
    styles = terminal.DEPTH_STYLES
    assert screen.written == [
        ("a", styles[0]), ("b", styles[1]), ("c", styles[2]), ("d", styles[0]), ("e", styles[1]), ("f", styles[0])
    ]  # fmt: skip


def test_a_text_that_stops_at_a_draft_ends_in_its_colour():
    stream = terminal.TokenStream(Screen(), Pieces(), colored=True)
    for step in (b"prompt", b"a", b"bc"):
        stream.put(torch.tensor(list(step)))
    stream.close(accepted=2)  # both tokens of the last step were drafted: the text stopped before the bonus
    assert stream.depths == [0, 1, 2]


def test_a_character_of_several_tokens_appears_when_it_is_whole():
    pieces = TextPieces(Pieces())
    assert [pieces.add(byte) for byte in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert pieces.add(0xC3) == "" and pieces.add(ord("x")) == "\ufffdx"
    assert pieces.add(0xC3, last=True) == "\ufffd"


def test_a_model_cannot_steer_the_terminal():
    assert terminal.printable("a\x1b[31m\x9b\r\x07b\n\tc") == "a\\x1b[31m\\x9b\\r\\x07b\n\tc"


def test_help_waits_for_neither_torch_nor_transformers():
    asked = [["--help"], *([command, "--help"] for command in COMMANDS)]
    script = (
        f"import sys, specheads_cli; codes = [specheads_cli.run(args) for args in {asked}]; "
        "sys.exit(any(codes) or not {'torch', 'transformers', 'specheads'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_help_and_a_bad_path_work_as_a_program(tmp_path):
    command = [sys.executable, "-m", "specheads_cli"]
    done = subprocess.run([*command, "info", str(tmp_path / "absent")], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert [line for line in done.stderr.splitlines() if line.startswith("specheads: ")] and "absent" in done.stderr


def test_calibrate_counts_a_tree_and_saves_it_with_the_head(shipped, tmp_path, capsys):
    head = tmp_path / "medusa"
    shutil.copytree(shipped / "medusa", head)
    rows = [{"input_ids": (ids := [7 + i % 50, 8, 9] * 6), "labels": ids} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    ask = ("calibrate", head, "--base", shipped / "base", "--data", data, "--num-nodes", 5)
    before = safetensors.torch.load_file(head / "model.safetensors")
    code, out, _ = run(capsys, *ask, "--save", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["tree"]) <= 4 and found["positions"] > 0
    assert found["accepted_length"] == pytest.approx(found["by_nodes"]["5"])
    lengths = list(found["by_nodes"].values())
    assert lengths == sorted(lengths)
    after = safetensors.torch.load_file(head / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()) and len(before) == len(after)
    _, out, _ = run(capsys, "info", head, "--json")
    assert json.loads(out)["options"]["tree"] == found["tree"]
    code, out, _ = run(capsys, *ask)
    assert code == 0 and "nodes" in out and "saved" not in out
    code, _, err = run(capsys, "calibrate", "some/where", "--data", data, "--save")
    assert code == 2 and "some/where is not a directory here" in err


def test_the_demo_tells_a_near_tie_from_a_text_that_is_the_same(shipped, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(story, "differences", lambda *args: ([], ["EAGLE-3 on prompt 1 from token 4 on"]))
    figures = tmp_path / "figures.json"
    code, out, _ = run(
        capsys, "demo", "--checkpoints", shipped, "--minutes", 0.02, "--num-prompts", 1, "--max-new-tokens", 8,
        "--output", tmp_path / "head", "--json", figures,
    )  # fmt: skip
    assert code == 0 and "but for near ties: EAGLE-3 on prompt 1" in " ".join(out.split())
    assert json.loads(figures.read_text())["same_text"] is False


def test_train_prints_one_json_object_and_nothing_else(shipped, tmp_path, capsys):
    rows = [{"text": "def f(x):\n    return x\n" * 3}] * 8
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
    code, out, _ = run(
        capsys, "train", "recipes/medusa.yaml", f"base={shipped / 'base'}", "base_dtype=float32", "head.num_heads=2", "head.draft_vocab_size=60",
        f"data.train={data}", "data.split=train", "data.eval_fraction=0.25", "data.max_length=32",
        f"training.output_dir={tmp_path / 'out'}", "training.bf16=false", "training.max_steps=3",
        "training.logging_steps=1", "training.eval_steps=2", "training.save_steps=2",
        "training.gradient_accumulation_steps=1", "--json",
    )  # fmt: skip
    assert code == 0 and json.loads(out)["eval_accepted_length"] >= 1
