"""How the console starts: another console's defaults, and models in four or eight bits."""

import json
import sys

import pytest
import torch

from specheads.cli.chat.session import Session
from specheads.cli.chat.settings import Processor, Settings, settings_like
from specheads.models.base import loading
from specheads.models.named import Models
from tests.support.command_line import run, ship


@pytest.fixture
def piped(capsys, monkeypatch, tmp_path):
    """Lines of input and the command's arguments → exit code, stdout and stderr."""

    def through(text, *arguments):
        (tmp_path / "input").write_text(text, "utf8")
        with open(tmp_path / "input", encoding="utf8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            return run(capsys, "chat", *arguments)

    return through


def test_romstos_console_starts_with_its_own_defaults(shipped, small, piped):
    """infer.py: γ 4, 35 tokens, n-grams on, of 3, three fillers, reset between prompts, greedy, seed 42."""
    code, out, _ = piped("hi\nhi\n", shipped / "base", "--assistant", small, "--like", "romsto", "--json")
    first, second = map(json.loads, out.splitlines())
    settings = first["settings"]
    wanted = {
        "gamma": 4, "length": 35, "ngram": True, "ngram_n": 3, "storage": "basic", "top_k_filler": 3,
        "reset_in_between": True, "seed": 42, "target": True, "speculative": True, "alone": False, "debug": "off",
        "drafter": "model", "chat": True,
    }  # fmt: skip
    assert code == 0 and {name: settings[name] for name in wanted} == wanted
    assert settings["processor"]["name"] == "greedy" and first["seed"] == 42
    assert list(first["modes"]) == ["target alone", "speculative", "n-gram"]
    texts = [{mode["text"] for mode in answer["modes"].values()} for answer in (first, second)]
    assert texts[0] == texts[1] and len(texts[0]) == 1, "each prompt is on its own"


def test_what_is_given_goes_before_another_consoles_defaults():
    given = settings_like("romsto", length=7, seed=1, tree="comb:2,2", processor=None)
    assert (given.length, given.seed, given.tree, given.processor, given.gamma) == (7, 1, "comb:2,2", Processor(), 4)
    assert settings_like(None) == Settings() and settings_like(None, length=9) == Settings(length=9)
    with pytest.raises(ValueError, match=r"^unknown console 'romtso'; did you mean 'romsto'\?$"):
        settings_like("romtso")


def test_what_is_not_remembered_is_not_in_the_conversation(shipped):
    models = Models.load(str(shipped / "base"), assistant=None, base=None, dtype="auto", device="cpu")
    session = Session(models, Settings(drafter="lookup", length=4, chat=True))
    outcome = session.run(session.modes()[0], "hi", 0)
    session.keep("hi", [outcome])
    assert len(session.turns) == 1
    session.change("remember", "off")
    assert not session.turns
    session.keep("hi", [outcome])
    assert not session.turns


@pytest.mark.parametrize("kind", ["base", "eagle3"])
def test_a_missing_library_is_one_line(kind, shipped, piped, monkeypatch):
    monkeypatch.setattr("specheads.models.base.loading.is_bitsandbytes_available", lambda: False)
    code, out, err = piped("x\n", shipped / kind, "--quantize", "4bit")
    assert (code, out) == (2, "")
    assert err.startswith("specheads: --quantize 4bit ") and err.count("\n") == 1


def test_an_unknown_quantization_is_one_line(shipped, piped):
    code, _, err = piped("x\n", shipped / "base", "--quantize", "8")
    assert code == 2 and err.startswith("specheads: --quantize '8': known: 4bit, 8bit") and err.count("\n") == 1


def test_both_models_are_asked_for_in_as_many_bits(shipped, small, monkeypatch):
    """Without the library: what its loading is asked for, a plain model instead of it."""
    asked, real = [], loading.AutoModelForCausalLM.from_pretrained

    def load(source, quantization_config, device_map, **options):
        asked.append((str(source), quantization_config, device_map))
        return real(source, **options)

    monkeypatch.setattr("specheads.models.named.quantization", lambda bits, dtype: (bits, dtype))
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    Models.load(str(shipped / "base"), assistant=str(small), base=None, dtype="auto", device="cpu", quantize="8bit")
    how = ((8, torch.float32), {"": torch.device("cpu")})
    assert asked == [(str(shipped / "base"), *how), (str(small), *how)]


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", ["base", "eagle3"])
def test_a_quantised_target_answers(kind, quantize, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = ship(tmp_path, hidden_size=64, intermediate_size=128)  # its 4 bits share a scale among 64 weights
    models = Models.load(
        str(folder / kind), assistant=str(folder / "base"), base=None, dtype="auto", device="cpu", quantize=quantize
    )
    layer = "Linear4bit" if quantize == "4bit" else "Linear8bitLt"
    for model in (models.target, models.drafters["model"].small):
        assert layer in {type(module).__name__ for module in model.modules()}
    session = Session(models, Settings(drafter=models.best, length=8))
    figures = {mode.name: session.run(mode, "x = ", 0).token_ids for mode in session.modes()}
    assert len(figures["target alone"]) == 8
    if quantize == "4bit":  # the eighth bit rounds activations by what else is in a pass
        assert figures["speculative"] == figures["target alone"]
