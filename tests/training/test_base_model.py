"""train/base_model.py: a base model, its tokenizer and its record, trained on a corpus that keeps some files apart."""

import contextlib
import io
import json
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from specheads import convert
from specheads.data import corpus
from specheads.training.base_model import parts, run
from specheads.training.base_model.options import Options
from tests.support.chat_tokenizer import build_tokenizer
from tests.support.tiny_models import tiny_llama
from train import base_model

SIZES = {
    "layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": 320, "batch_size": 2,
    "sequence_length": 24, "minutes": 0.01,
}  # fmt: skip
NEW = ("hidden_size", "intermediate_size", "head_dim", "vocab_size")  # sizes of a model from scratch alone


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """41 source files, each with a word of its own: of these the usual rule holds out the 1st, 21st and 41st."""
    folder = tmp_path_factory.mktemp("library")
    for number in range(41):
        name = f"zq{chr(97 + number // 26)}{chr(97 + number % 26)}"
        (folder / f"m{number:02}.py").write_text(f"def {name}(value):\n    return [value, value + 1]\n\n\n" * 8, "utf8")
    return folder


def words_of(text):
    """Which files it has text of."""
    return {int(n) for n in range(41) if f"def zq{chr(97 + n // 26)}{chr(97 + n % 26)}" in text}


class Refused(Exception):
    """The program ended with an exit code that is not 0. str(): what it printed on stderr."""


def train(library, output, **options):
    """Run the program there; what it read, in the order it read it."""
    seen = {"tokenizer": [], "batches": []}
    learn, draw = run.train_tokenizer, run.batch

    def learning(texts, vocab_size):
        seen["tokenizer"].append(words_of("".join(texts)))
        return learn(texts, vocab_size)

    def drawing(data, *args):
        seen["batches"].append(data)
        return draw(data, *args)

    arguments = []
    sizes = {name: value for name, value in SIZES.items() if "init" not in options or name not in NEW}
    for name, value in {**sizes, "output_dir": output, **options}.items():
        arguments += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "stdlib_files", lambda: {path.name: path for path in sorted(library.glob("*.py"))})
        patch.setattr(run, "train_tokenizer", learning)
        patch.setattr(run, "batch", drawing)
        patch.setattr(sys, "argv", ["base_model.py", *arguments])
        with contextlib.redirect_stderr(io.StringIO()) as said:
            failed = base_model.main()
    if failed:
        raise Refused(said.getvalue())
    tokenizer = AutoTokenizer.from_pretrained(output)
    seen["batches"] = [words_of(tokenizer.decode(data)) for data in seen["batches"]]
    return seen


@pytest.fixture(scope="module")
def made(library, tmp_path_factory):
    output = tmp_path_factory.mktemp("made")
    return output, train(library, output)


HELD_OUT = {0, 20, 40}


def test_held_out_files_are_kept_from_the_tokenizer_and_the_training(made):
    output, seen = made
    assert (output / "held_out.txt").read_text("utf8").split() == ["m00.py", "m20.py", "m40.py"]
    assert seen["tokenizer"] == [set(range(41)) - HELD_OUT]
    assert all(words in (HELD_OUT, set(range(41)) - HELD_OUT) for words in seen["batches"])
    # 16 batches of held-out text before training and 16 after it; in between the others.
    assert [words == HELD_OUT for words in seen["batches"]] == [
        i < 16 or i >= len(seen["batches"]) - 16 for i in range(len(seen["batches"]))
    ]


def test_what_was_made_loads_writes_and_takes_a_head(made):
    output, seen = made
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert isinstance(model, LlamaForCausalLM) and model.dtype == torch.bfloat16 and model.config.vocab_size == 320
    assert tokenizer.decode(tokenizer("def f(é):\n")["input_ids"]) == "def f(é):\n"
    message = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|user|>a<|assistant|>b<|endoftext|>"
    inputs = tokenizer("def zq", return_tensors="pt")
    text = model.float().generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(convert(model, "medusa").generate(**inputs, max_new_tokens=6, do_sample=False), text)
    record = json.loads((output / "training.json").read_text("utf8"))
    steps = len(seen["batches"]) - 32
    assert record["steps"] == steps >= 1 and record["tokens"] == steps * 2 * 24
    assert record["options"]["vocab_size"] == 320 and record["parameters"] == model.num_parameters()
    held_out = "def zqaa(value):\n    return [value, value + 1]\n\n\n" * 8
    ids = tokenizer(held_out, return_tensors="pt")
    with torch.no_grad():
        loss = float(model(**ids, labels=ids["input_ids"]).loss)
    assert record["held_out_loss"] == pytest.approx(loss, abs=1.0)  # of windows that begin anywhere
    assert record["bits_per_byte"] < record["held_out_loss"] / 0.69


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_run_resumes_from_a_saved_model_with_its_held_out_files(made, library, tmp_path, layers):
    """Whatever the rule would now hold out, and with its tokenizer."""
    first, _ = made
    (copy := tmp_path / "init").mkdir()
    for path in first.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "held_out.txt").write_text("m07.py\nm08.py\nm09.py\n", "utf8")
    seen = train(library, tmp_path / "out", init=copy, layers=layers)
    assert (tmp_path / "out" / "held_out.txt").read_text("utf8").split() == ["m07.py", "m08.py", "m09.py"]
    assert seen["tokenizer"] == [] and seen["batches"][0] == {7, 8, 9}
    assert all(words == set(range(41)) - {7, 8, 9} for words in seen["batches"][16:-16])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == layers


def test_several_processes_are_refused(library, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match="2 processes were started, and each would write"):
        train(library, tmp_path / "base")
    assert not (tmp_path / "base").exists()


def test_a_run_into_the_same_folder_keeps_its_held_out_files(library, tmp_path):
    (tmp_path / "held_out.txt").write_text("m30.py\nm31.py\nm32.py\n", "utf8")
    seen = train(library, tmp_path)
    assert seen["batches"][0] == {30, 31, 32} and seen["tokenizer"] == [set(range(41)) - {30, 31, 32}]


def test_a_finished_model_keeps_its_tokenizer_until_another_is_saved_in_its_folder(
    made, library, tmp_path, monkeypatch
):
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def failing(*args):
        raise RuntimeError("stopped")

    monkeypatch.setattr(run.Run, "train_step", failing)
    with pytest.raises(RuntimeError, match="stopped"):
        train(library, tmp_path, vocab_size=300)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_deepened_model_starts_as_the_same_function(made):
    first, _ = made
    models = [LlamaForCausalLM.from_pretrained(first, dtype=torch.float32) for _ in range(2)]
    deeper = parts.with_layers(models[1], 5)
    ids = torch.randint(4, 320, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(deeper(ids, use_cache=False).logits, models[0](ids, use_cache=False).logits)
    assert [layer.self_attn.layer_idx for layer in deeper.model.layers] == list(range(5))


@pytest.mark.parametrize("old", [1, 2, 3, 4])
def test_a_model_has_as_many_layers_as_asked_for_however_many_more_and_restores_as_the_same_function(old, tmp_path):
    ids = torch.randint(4, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    for layers in range(old + 1, 4 * old + 2):
        deeper = parts.with_layers(tiny_llama(num_hidden_layers=old), layers)
        assert len(deeper.model.layers) == deeper.config.num_hidden_layers == layers
        deeper.save_pretrained(tmp_path)
        restored = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(restored(ids).logits, deeper(ids).logits)


def test_a_new_model_has_the_vocabulary_and_the_special_tokens_of_its_tokenizer(tmp_path):
    own = build_tokenizer()
    model = parts.build_model(Options(str(tmp_path), vocab_size=12), own)
    ids = (own.bos_token_id, own.eos_token_id, own.pad_token_id)
    assert len(model.get_input_embeddings().weight) == len(own) != 12 and model.config.num_hidden_layers == parts.LAYERS
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "saved", "hidden_size": 64}, "--hidden_size 64: --init saved has its own; leave one out"),
        ({"init": "saved", "vocab_size": 9}, "--vocab_size 9: --init saved"),
        ({"config": "config.json", "layers": 3}, "--layers 3: --config config.json has its own"),
    ],
    ids=str,
)
def test_sizes_that_a_saved_model_has_already_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run.refuse_wrong_start(Options(str(tmp_path), **options))


@pytest.mark.parametrize("option", ["init", "teacher"])
def test_a_draft_head_is_no_model_to_start_or_learn_from(option, tmp_path):
    with pytest.raises(ValueError, match="eagle3 is a draft head, not a language model"):
        run.refuse_wrong_start(Options(str(tmp_path), **{option: str(corpus.checkpoints_dir() / "eagle3")}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--minutes 0", "--minutes 0: expected a number above 0"),
        ("--tokens 0.5", "--tokens 0.5: give a number of tokens to train on"),
        ("--save_steps 0", "--save_steps 0: expected at least 1"),
        ("--files 0", "--files 0: expected at least 1"),
        ("--batch_size 0", "--batch_size 0: expected at least 1"),
        ("--layers 0", "--layers 0: expected at least 1"),
        ("--sequence_length 1", "--sequence_length 1: expected at least 2"),
        ("--seed -1", "--seed -1: expected at least 0"),
        ("--flat_fraction 1.5", "--flat_fraction 1.5: expected a share"),
        ("--hidden_size 8 --head_dim 16", "--hidden_size 8 --head_dim 16: gives 0 heads"),
        ("--hidden_size 80 --head_dim 16", "--hidden_size 80 --head_dim 16: gives 5 heads"),
        ("--hidden_size 15 --head_dim 5", "--head_dim 5: expected an even number"),
    ],
)
def test_a_size_that_trains_nothing_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["base_model.py", "--output_dir", str(tmp_path / "out"), *options.split()])
    assert base_model.main() == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"train/base_model.py: {message}") and not (tmp_path / "out").exists()


def test_a_new_model_takes_texts_of_the_length_it_was_trained_on(tmp_path):
    for length, positions in ((512, 1024), (2048, 2048)):
        model = parts.build_model(Options(str(tmp_path), sequence_length=length, layers=1), build_tokenizer())
        assert model.config.max_position_embeddings == positions
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"--sequence_length 4096: .* takes texts of 2048 tokens"):
        parts.build_model(Options("out", init=str(tmp_path), sequence_length=4096), build_tokenizer())


def test_a_saved_model_keeps_its_layers_unless_others_are_asked_for(made):
    tokenizer = AutoTokenizer.from_pretrained(made[0])
    assert parts.build_model(Options("out", init=str(made[0])), tokenizer).config.num_hidden_layers == 2


STEP = SIZES["batch_size"] * SIZES["sequence_length"]  # tokens


def test_a_budget_of_tokens_ends_the_run_at_the_first_step_that_reaches_it(library, made, tmp_path):
    for tokens, steps in ((5 * STEP, 5), (5 * STEP + 1, 6)):
        seen = train(library, tmp_path / str(tokens), init=made[0], layers=2, tokens=tokens)
        record = json.loads((tmp_path / str(tokens) / "training.json").read_text("utf8"))
        assert record["steps"] == steps and record["tokens"] == steps * STEP and len(seen["batches"]) == steps + 32


def test_the_learning_rate_follows_the_budget_of_tokens():
    options = Options("out", tokens=2000.0, batch_size=1, sequence_length=2, flat_fraction=0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    state = run.Run(options, None, [(optimizer, 2.0)], None, None)
    for step, scale in ((0, 0.02), (24, 0.5), (400, 1.0), (750, 0.5), (999, 0.01)):
        state.step = step
        state.set_learning_rates()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * scale), step


def test_files_and_folders_of_ones_own_are_trained_on_but_for_those_held_out(library, made, tmp_path):
    own = tmp_path / "own" / "deep"
    own.mkdir(parents=True)
    (own / "held.py").write_text((library / "m20.py").read_text("utf8"), "utf8")  # a copy of a file held out
    (own / "more.py").write_text("def zqzz(more):\n    return more\n\n\n" * 12, "utf8")
    (own / "notes.txt").write_text("zqyy is in no .py file of the folder\n" * 12, "utf8")
    (tmp_path / "alone.txt").write_text("zqxx is in a file that is named\n" * 12, "utf8")
    folders = [str(tmp_path / "own"), str(tmp_path / "alone.txt")]
    options = Options("out", data=folders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "stdlib_files", lambda: {path.name: path for path in sorted(library.glob("*.py"))})
        train_texts, eval_texts = run.load_texts(options, ["m00.py", "m20.py", "m40.py"])
    text = "".join(train_texts)
    assert "zqzz" in text and "zqxx" in text and "zqyy" not in text
    assert words_of(text) == set(range(41)) - HELD_OUT and words_of("".join(eval_texts)) == HELD_OUT
    for wrong, message in (("nowhere", "no such file or folder"), (str(tmp_path / "empty"), "no .py file in it")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(Refused, match=message):
            train(library, tmp_path / "out", init=made[0], layers=2, data=[wrong])


def test_packages_give_the_source_they_wrote_themselves(library, made, tmp_path, monkeypatch):
    """Neither their tests, nor copies of other packages, nor what a program wrote, nor a file that is held out."""
    texts = {
        "zq/code.py": "def zqzz(more):\n    return more\n\n\n" * 12,
        "zq/tests/test_code.py": "def zqyy(more):\n    return more\n\n\n" * 12,
        "zq/_vendor/other.py": "def zqxx(more):\n    return more\n\n\n" * 12,
        "zq/tables.py": "# This file was automatically generated from zq/grammar.txt\nzqww = (1, 2, 3)\n"
        + "pass\n" * 60,
        "zq/held.py": (library / "m20.py").read_text("utf8"),
        "zq/notes.txt": "zqvv is in no .py file of the package\n" * 12,
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf8")
    (tmp_path / "zq-1.2.dist-info").mkdir()
    (tmp_path / "zq-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: zq\nVersion: 1.2\n")
    (tmp_path / "zq-1.2.dist-info" / "RECORD").write_text("".join(f"{name},,\n" for name in texts))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(corpus, "stdlib_files", lambda: {path.name: path for path in sorted(library.glob("*.py"))})
    train_texts, _ = run.load_texts(Options("out", packages=["zq"]), ["m00.py", "m20.py", "m40.py"])
    text = "".join(train_texts)
    assert {word for word in ("zqzz", "zqyy", "zqxx", "zqww", "zqvv") if word in text} == {"zqzz"}
    assert words_of(text) == set(range(41)) - HELD_OUT
    with pytest.raises(Refused, match="--packages absent: not installed here"):
        train(library, tmp_path / "out", init=made[0], layers=2, packages=["absent"])


def test_so_many_files_of_the_library_are_drawn_by_the_seed(library):
    def drawn(**options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus, "stdlib_files", lambda: {path.name: path for path in sorted(library.glob("*.py"))})
            train_texts, eval_texts = run.load_texts(Options("out", **options), ["m00.py", "m20.py", "m40.py"])
        assert words_of("".join(eval_texts)) == HELD_OUT
        return words_of("".join(train_texts))

    assert len(drawn(files=7)) == 7 and drawn(files=7) == drawn(files=7) != drawn(files=7, seed=1)
    assert drawn(files=99) == drawn() == set(range(41)) - HELD_OUT
