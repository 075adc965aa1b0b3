"""Fixtures: a tiny random base model, so that the claims are about the code and not about a checkpoint."""
# ruff: noqa: E402 (shared modules are registered for asserts before they are imported)

import functools
import gc
import json
import logging
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make test` does: a forked process waits for the threads it lacks

# They assert too, and pytest rewrites the asserts of test files alone.
pytest.register_assert_rewrite("tests.reference", "tests.support")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

import typer
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from specheads import convert
from specheads.data import corpus
from specheads.training.report import curves
from tests.support.tiny_models import tiny_llama


@pytest.hookimpl(hookwrapper=True)
def pytest_generate_tests(metafunc):
    """Of a grid marked sampled(n), `-m "not slow"` makes every n-th case alone: making all to leave most out again took
    each process longer than many a file's tests."""
    yield
    if metafunc.config.option.markexpr == "not slow":
        if (sampled := metafunc.definition.get_closest_marker("sampled")) is not None:
            metafunc._calls[:] = metafunc._calls[:: sampled.args[0]]
        if metafunc.definition.get_closest_marker("slow") is not None:
            del metafunc._calls[1:]


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """What is imported and collected stays, so the garbage collections of each Trainer need not go through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def made_once():
    """What is the same in each test and takes long: the list of the standard library's files, the command's parser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "stdlib_files", functools.cache(corpus.stdlib_files))
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def same_environ(monkeypatch):
    """datasets puts a copy in the place of os.environ when it maps in several processes, and rich goes on reading the
    one that it was imported with."""
    monkeypatch.setattr(os, "environ", os.environ)


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """A run ends with a picture that takes longer than its steps here: drawn in tests marked draws."""
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr(curves, "draw", lambda folder, history: None)


@pytest.fixture(scope="session")
def base():
    return tiny_llama()


@pytest.fixture(scope="session")
def shipped(tmp_path_factory):
    """A folder as checkpoints/ is: a tiny random base with a byte tokenizer, and two heads for it."""
    from tests.support.command_line import ship

    return ship(tmp_path_factory.mktemp("shipped"))


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    """A base on disk, whose name its heads record."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def named(base_dir):
    """The base of base_dir, which knows its name."""
    return AutoModelForCausalLM.from_pretrained(base_dir)


@pytest.fixture(scope="module")
def model(base):
    """The base with an EAGLE-3 head as it starts out."""
    torch.manual_seed(0)
    return convert(base, "eagle3")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def cache_in_tmp(monkeypatch, tmp_path):
    """Where datasets keeps what it has read."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hf_log(caplog):
    """What the library logs through transformers' logger, which keeps it from the root logger."""
    level = hf_logging.get_verbosity()  # commands of other tests set it
    hf_logging.set_verbosity_warning()
    hf_logging.enable_propagation()
    logging.getLogger("specheads").propagate = True
    yield caplog
    hf_logging.disable_propagation()
    hf_logging.set_verbosity(level)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A tiny base with a tokenizer of words, and rows of text of unequal lengths."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("material")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 97)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    fast.save_pretrained(folder / "base")
    tiny_llama(num_hidden_layers=3).save_pretrained(folder / "base")
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 16), ("eval", 5)):  # 5: the last batch of two processes is filled up
        lengths = torch.randint(5, 16, (count,), generator=generator).tolist()
        texts = [" ".join(f"w{i}" for i in torch.randint(3, 97, (n,), generator=generator).tolist()) for n in lengths]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder
