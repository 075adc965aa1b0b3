"""Claims about specheads/checkpoint.py: a head comes back bit for bit, a bad checkpoint is refused with the reason,
and a save that dies leaves the old checkpoint or none."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

import specheads
from specheads import CheckpointError, SpecConfig, SpecModel, checkpoint, convert, load_head
from specheads.heads import HEADS

IDS = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(1))
FILES = {"model.safetensors", "config.json"}


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory):
    """A base on disk, whose name its heads record."""
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def named(base_dir):
    return AutoModelForCausalLM.from_pretrained(base_dir)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def hf_log(caplog):
    """What the library logs through transformers' logger, which keeps it from the root logger."""
    hf_logging.enable_propagation()
    logging.getLogger("specheads").propagate = True
    yield caplog
    hf_logging.disable_propagation()


def trained(base, head, seed=5, **options) -> SpecModel:
    """A head with random weights everywhere, so that nothing agrees by being at its start."""
    model = convert(base, head, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if head == "eagle3":
        model.head.set_draft_vocabulary(torch.rand(model.head.config.vocab_size, generator=generator))
    return model.eval()


def digest(model) -> str:
    parts = (f"{n} {t.dtype} {tuple(t.shape)} {t.double().numpy().tobytes()!r}" for n, t in state(model).items())
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def state(model):
    return model.head_state_dict()


def same(model, other):
    ours, theirs = state(model), state(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(t, theirs[name]) and t.dtype == theirs[name].dtype for name, t in ours.items()
    )


CASES = [("medusa", {"num_heads": 2}), ("eagle", {"num_layers": 2}), ("eagle3", {"draft_vocab_size": 40})]


# --- what comes back ---


@pytest.mark.parametrize(("head", "options"), CASES)
def test_every_way_of_loading_restores_the_head_bit_for_bit(named, tmp_path, head, options):
    model = trained(named, head, **options)
    model.save_pretrained(tmp_path / "head")
    plain = model.generate(IDS, max_new_tokens=6)
    for restored in (
        SpecModel.from_pretrained(tmp_path / "head"),
        SpecModel.from_pretrained(str(tmp_path / "head")),
        AutoModelForCausalLM.from_pretrained(tmp_path / "head"),
        load_head(named, tmp_path / "head"),
        load_head(named, str(tmp_path / "head")),
        SpecModel.from_pretrained(tmp_path, subfolder="head"),
        AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="head"),
    ):
        assert isinstance(restored, SpecModel) and same(restored, model)
        assert restored.head.config == model.head.config
        assert not restored.training and not restored.head.training
        assert all(p.requires_grad for p in restored.head.parameters())
        assert not any(p.requires_grad for p in restored.base.parameters())
        assert torch.equal(restored.generate(IDS, max_new_tokens=6), plain)
    config = AutoConfig.from_pretrained(tmp_path / "head")
    assert isinstance(config, SpecConfig) and config.head_config() == model.head.config


def test_a_new_process_restores_every_head_bit_for_bit(named, tmp_path):
    models = [trained(named, head, **options) for head, options in CASES]
    for model, (head, _) in zip(models, CASES, strict=True):
        model.save_pretrained(tmp_path / head)
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "import specheads\n"
        "from transformers import AutoModelForCausalLM\n"
        "from test_checkpoint import IDS, digest\n"
        "for folder in sys.argv[2:]:\n"
        "    model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "    print(digest(model), model.generate(IDS, max_new_tokens=6).tolist())\n"
    )
    folders = [str(tmp_path / head) for head, _ in CASES]
    lines = in_new_process(script, str(Path(__file__).parent), *folders)
    assert lines == [f"{digest(m)} {m.generate(IDS, max_new_tokens=6).tolist()}" for m in models]


def in_new_process(script, *arguments):
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("head", HEADS)
def test_the_files_hold_the_head_alone(named, tmp_path, head):
    model = trained(named, head)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == state(model).keys() and all(name.startswith("head.") for name in tensors)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert size <= (tmp_path / "model.safetensors").stat().st_size < size + 16_384
    config = json.loads((tmp_path / "config.json").read_text("utf8"))
    assert config["head"]["kind"] == head
    assert config["base_fingerprint"]["hidden_size"] == 32
    assert "_name_or_path" not in config


def changed_options(head: str) -> dict:
    """Every option of a head, each at another value than its default."""
    given = {
        "hidden_size": 32, "vocab_size": 97, "tap": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 6, "intermediate_size": 24, "rms_norm_eps": 1e-3, "rope_theta": 77.0, "draft_vocab_size": 19,
        "taps": (4,) if head == "eagle" else (1, 4, 6),
    }  # fmt: skip
    for option in dataclasses.fields(HEADS[head].Config):
        if option.name not in given:
            value = option.default
            assert value is not None, f"give {option.name} a value in this test"
            given[option.name] = not value if isinstance(value, bool) else value + 1 if value >= 1 else value / 2
    return {option.name: given[option.name] for option in dataclasses.fields(HEADS[head].Config)}


@pytest.mark.parametrize("head", HEADS)
def test_every_option_of_a_head_comes_back(named, tmp_path, head):
    options = changed_options(head)
    model = trained(named, head, **options)
    model.save_pretrained(tmp_path)
    restored = SpecModel.from_pretrained(tmp_path)
    assert dataclasses.asdict(restored.head.config) == options
    assert same(restored, model)
    # the weights file alone, and a weights file that has lost its header, are whole as well
    (tmp_path / "config.json").rename(tmp_path / "aside")
    assert load_head(named, tmp_path).head.config == model.head.config
    (tmp_path / "aside").rename(tmp_path / "config.json")
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors")
    assert load_head(named, tmp_path).head.config == model.head.config


def test_a_draft_vocabulary_comes_back(named, tmp_path):
    model = trained(named, "eagle3", draft_vocab_size=40)
    model.save_pretrained(tmp_path)
    head = SpecModel.from_pretrained(tmp_path).head
    assert torch.equal(head.d2t, model.head.d2t) and head.d2t.dtype == torch.int64 and head.d2t.any()
    assert torch.equal(head.t2d, model.head.t2d) and head.t2d.dtype == torch.bool and head.t2d.sum() == 40
    assert torch.equal(torch.arange(40) + head.d2t, head.t2d.nonzero().squeeze(1))


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_keeps_the_dtype_it_was_saved_in(named, tmp_path, saved):
    model = trained(named, "eagle3", dtype=saved)
    model.save_pretrained(tmp_path)
    assert same(load_head(named, tmp_path), model)
    assert same(load_head(tiny_llama().to(torch.bfloat16), tmp_path), model)


def test_tensors_of_several_dtypes_come_back_each_in_its_own(named, tmp_path):
    model = trained(named, "eagle3")
    model.head.lm_head.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert same(load_head(named, tmp_path), model)


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"dtype": "bfloat16"}, {"torch_dtype": torch.bfloat16}, {"torch_dtype": "bfloat16"}],
)
@pytest.mark.parametrize("loader", [SpecModel.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_a_dtype_is_that_of_base_and_head(named, tmp_path, options, loader):
    trained(named, "eagle3").save_pretrained(tmp_path)
    model = loader(tmp_path, **options)
    assert model.dtype == model.head.dtype == torch.bfloat16
    assert model.head.d2t.dtype == torch.int64
    assert loader(tmp_path, dtype="auto").head.dtype == torch.float32


def test_a_dtype_beside_a_base_in_memory_is_the_heads(named, tmp_path):
    trained(named, "eagle").save_pretrained(tmp_path)
    for dtype in (torch.float16, "float16"):
        model = load_head(named, tmp_path, dtype=dtype)
        assert (model.head.dtype, model.base.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("loader", [SpecModel.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_what_concerns_the_base_reaches_it(named, tmp_path, loader, monkeypatch):
    trained(named, "eagle").save_pretrained(tmp_path)
    assert loader(tmp_path, attn_implementation="eager").base.config._attn_implementation == "eager"
    asked = {}

    def from_pretrained(name, *args, **kwargs):
        asked.update(kwargs)
        base = tiny_llama()
        base.hf_device_map = {"model": 0, "lm_head": 1}
        return base

    monkeypatch.setattr(type(named), "from_pretrained", from_pretrained)
    model = loader(tmp_path, device_map="auto", trust_remote_code=False)
    assert asked["device_map"] == "auto"
    # launchers and pipelines ask the whole model where its parts are, and then leave them there
    assert model.hf_device_map == {"base.model": 0, "base.lm_head": 1}
    assert not hasattr(load_head(tiny_llama(), tmp_path), "hf_device_map")


def test_options_that_would_do_nothing_are_refused(named, tmp_path):
    trained(named, "eagle").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\['device_map'\] would have no effect on a base that is in memory"):
        load_head(named, tmp_path, device_map="auto")


# --- which base ---


def test_base_overrides_the_recorded_one(named, base_dir, tmp_path):
    model = trained(named, "medusa")
    model.save_pretrained(tmp_path / "head")
    other = tmp_path / "elsewhere"
    shutil.copytree(base_dir, other)
    in_memory = tiny_llama()
    assert SpecModel.from_pretrained(tmp_path / "head", base=in_memory).base is in_memory
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "head", base=in_memory).base is in_memory
    for base in (other, str(other)):
        restored = SpecModel.from_pretrained(tmp_path / "head", base=base)
        assert restored.base.name_or_path == str(other) == restored.config.base_model_name_or_path
        assert same(restored, model)


def test_checkpoint_and_base_move_together(named, tmp_path):
    base = tmp_path / "here" / "models" / "base"
    named.save_pretrained(base)
    model = trained(AutoModelForCausalLM.from_pretrained(base), "medusa")
    model.save_pretrained(tmp_path / "here" / "heads" / "first")
    model.save_pretrained(base / "head")
    model.save_pretrained(base.parent)
    moved = tmp_path / "there"
    (tmp_path / "here").rename(moved)
    for folder in (moved / "heads" / "first", moved / "models" / "base" / "head", moved / "models"):
        restored = SpecModel.from_pretrained(folder)
        assert same(restored, model)
        assert Path(restored.base.name_or_path) == moved / "models" / "base"
        assert restored.name_or_path == str(folder)
        assert str(tmp_path) not in (folder / "config.json").read_text("utf8"), "a path of this machine got out"


def test_a_restored_head_saved_elsewhere_still_finds_its_base(named, tmp_path, monkeypatch):
    trained(named, "medusa").save_pretrained(tmp_path / "a")
    SpecModel.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b" / "c" / "d")
    assert str(tmp_path) not in (tmp_path / "b" / "c" / "d" / "config.json").read_text("utf8")
    assert SpecModel.from_pretrained(tmp_path / "b" / "c" / "d").base.name_or_path == named.name_or_path
    # also beside a base in memory that has no name, from a relative path, after a change of directory
    monkeypatch.chdir(tmp_path)
    model = load_head(tiny_llama(), "a")
    monkeypatch.chdir("/")
    model.save_pretrained(tmp_path / "e" / "f")
    assert SpecModel.from_pretrained(tmp_path / "e" / "f").base.name_or_path == named.name_or_path


def test_a_head_is_not_saved_over_a_model(named, tmp_path):
    named.save_pretrained(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="holds a llama model, which the head's files would replace"):
        trained(named, "medusa").save_pretrained(tmp_path)
    assert contents(tmp_path) == before


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_base_that_is_gone_is_asked_for(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    model = trained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "medusa")
    model.save_pretrained(tmp_path / "head")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"base model of .* is not at .*base; give its place with base="):
        SpecModel.from_pretrained(tmp_path / "head")
    assert same(SpecModel.from_pretrained(tmp_path / "head", base=tiny_llama()), model)
    with pytest.raises(CheckpointError, match=r"base model '/nowhere' .* cannot be loaded; give another with base="):
        SpecModel.from_pretrained(tmp_path / "head", base="/nowhere")


def test_a_base_on_the_hub_that_cannot_be_had_is_asked_for(tmp_path):
    base = tiny_llama()
    base.config.name_or_path = base.name_or_path = "someone/some-model"
    trained(base, "medusa").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["base_model_name_or_path"] == "someone/some-model"
    with pytest.raises(CheckpointError, match=r"base model 'someone/some-model' .* give another with base="):
        SpecModel.from_pretrained(tmp_path)


def test_the_recorded_revision_is_of_the_recorded_base_only(named, base_dir, tmp_path, monkeypatch):
    trained(named, "medusa").save_pretrained(tmp_path)
    edit_config(tmp_path, base_revision="abc", base_model_name_or_path="someone/some-model")
    asked = []

    def from_pretrained(name, **kwargs):
        asked.append((name, kwargs.get("revision"), kwargs.get("token"), "adapter_kwargs" in kwargs))
        return tiny_llama()

    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    SpecModel.from_pretrained(tmp_path, revision="of-the-head", token="secret", adapter_kwargs={}, subfolder="")
    SpecModel.from_pretrained(tmp_path, base="another/model")
    assert asked == [("someone/some-model", "abc", "secret", False), ("another/model", None, None, False)]


def edit_config(folder, **changes):
    """Change the config in both of its places; None takes an entry away."""
    path = Path(folder) / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    config = {**json.loads(metadata["specheads_config"]), **changes}
    text = json.dumps({name: value for name, value in config.items() if value is not None})
    save_file(load_file(path), path, {**metadata, "specheads_config": text})
    (Path(folder) / "config.json").write_text(text, "utf8")


def test_a_checkpoint_that_names_no_base_asks_for_one(base, tmp_path):
    model = trained(base, "eagle")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not name the base it was trained for; give it with base="):
        SpecModel.from_pretrained(tmp_path)
    assert same(SpecModel.from_pretrained(tmp_path, base=base), model)


def test_a_base_of_other_sizes_is_refused_with_every_difference(named, tmp_path):
    trained(named, "medusa").save_pretrained(tmp_path)
    other = tiny_llama(hidden_size=48, num_hidden_layers=4, vocab_size=90, num_attention_heads=6)
    with pytest.raises(CheckpointError, match="was trained for another base") as error:
        load_head(other, tmp_path)
    for difference in (
        "hidden_size is 48, not 32", "num_hidden_layers is 4, not 8", "vocab_size is 90, not 97",
        "num_attention_heads is 6, not 4",
    ):  # fmt: skip
        assert difference in str(error.value)
    assert "intermediate_size" not in str(error.value)
    edit_config(tmp_path, base_fingerprint=None)
    with pytest.raises(CheckpointError, match="hidden_size is 48, not 32, vocab_size is 90, not 97"):
        load_head(other, tmp_path)
    with pytest.raises(ValueError, match="already has a head"):
        load_head(convert(named, "eagle"), tmp_path)


def test_a_base_of_other_weights_is_a_warning(named, tmp_path, hf_log):
    model = trained(named, "medusa")
    model.save_pretrained(tmp_path / "head")
    load_head(tiny_llama(), tmp_path / "head")
    load_head(tiny_llama().to(torch.bfloat16), tmp_path / "head")
    assert "weights differ" not in hf_log.text
    tuned = tiny_llama()
    with torch.no_grad():
        tuned.model.layers[3].mlp.up_proj.weight.mul_(1.1)  # as a merged adapter would
    restored = load_head(tuned, tmp_path / "head")
    assert same(restored, model) and "weights differ from this base's" in hf_log.text
    # saved again, it is a head of the base it now sits on
    hf_log.clear()
    restored.save_pretrained(tmp_path / "again")
    load_head(tuned, tmp_path / "again")
    assert "weights differ" not in hf_log.text


def test_a_head_trained_on_an_adapter_says_so_beside_the_bare_base(named, tmp_path, hf_log):
    from test_convert import with_adapter

    adapted = with_adapter()
    model = trained(adapted, "eagle")
    model.save_pretrained(tmp_path)
    assert same(load_head(adapted, tmp_path), model)
    assert "weights differ" not in hf_log.text
    load_head(named, tmp_path)
    assert "weights differ" in hf_log.text


# --- what is refused ---


@pytest.fixture
def saved(named, tmp_path):
    trained(named, "eagle3", draft_vocab_size=40).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def refused(folder, message, base=None):
    for loader in (SpecModel.from_pretrained, lambda source: load_head(base or tiny_llama(), source)):
        with pytest.raises(CheckpointError, match=message):
            loader(folder)


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("head.fc.weight"), r"do not fit its head: missing \['head.fc.weight'\]$"),
        (lambda t: t.pop("head.d2t"), r"missing \['head.d2t'\]$"),
        (lambda t: t.update({"head.x": torch.ones(1)}), r"unexpected \['head.x'\]$"),
        (lambda t: t.update({"base.lm_head.weight": torch.ones(1)}), r"unexpected \['base.lm_head.weight'\]$"),
        (
            lambda t: t.update({"head.fcc.weight": t.pop("head.fc.weight")}),
            r"missing \['head.fc.weight'\]; unexpected \['head.fcc.weight'\]$",
        ),
        (lambda t: t.clear(), r"missing \['head.blocks.0"),
        (
            lambda t: t.update({"head.fc.weight": torch.ones(32, 95)}),
            r"head.fc.weight has shape \(32, 95\), not \(32, 96\)$",
        ),
        (lambda t: t.update({"head.fc.weight": torch.ones(32 * 96)}), r"shape \(3072,\), not \(32, 96\)$"),
        (
            lambda t: t.update({"head.fc.weight": torch.ones(32, 96, dtype=torch.int64)}),
            r"head.fc.weight is torch.int64, not torch.float32$",
        ),
        (lambda t: t.update({"head.d2t": torch.ones(40)}), r"head.d2t is torch.float32, not torch.int64$"),
        (
            lambda t: t.update({n: v.long() for n, v in t.items() if v.is_floating_point()}),
            r"head.norm.weight is torch.int64, not torch.float32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, edit, message):
    edit_tensors(saved, edit)
    refused(saved, message)


def test_a_truncated_file_is_refused_whatever_is_left(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    lengths = {0, 1, 7, 8, 9, 8 + header // 2, 7 + header, 8 + header, 9 + header, len(whole) // 2, len(whole) - 1}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        refused(saved, "model.safetensors is damaged or cut short .*; copy or train it again")
    path.write_bytes(whole + b"more")
    refused(saved, "is damaged or cut short")
    path.write_bytes(whole)
    assert SpecModel.from_pretrained(saved)


def raw(header: dict | bytes, body=b"0000", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    [
        raw({"head.fc.weight": entry(shape=(10**9, 10**9))}),
        raw({"head.fc.weight": entry(shape=(10**12,), offsets=(0, 4 * 10**12))}),
        raw({"head.fc.weight": entry(shape=(-1,))}),
        raw({"head.fc.weight": entry(), "head.norm.weight": entry()}),
        raw({"head.fc.weight": entry(), "head.norm.weight": entry(offsets=(2, 6))}, b"000000"),
        raw({"head.fc.weight": entry(dtype="Pickle")}),
        raw({"head.fc.weight": entry(offsets=(4, 0))}),
        raw({}, length=2**60),
        raw(b"[1, 2]"),
        raw(b"\x80\x04not json"),
        b"PK\x03\x04 a zip, as torch.save writes it" * 9,
    ],
)
def test_a_hostile_header_is_refused(saved, content):
    (saved / "model.safetensors").write_bytes(content)
    refused(saved, "is damaged or cut short")


def test_damage_anywhere_gives_a_checkpoint_error_or_a_whole_head(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    rng, base = random.Random(0), tiny_llama()
    failed = 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            content[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(content)
        try:
            load_head(base, saved)
        except CheckpointError:
            failed += 1
    assert failed > 100


def test_options_that_claim_more_than_the_file_holds_allocate_nothing(saved):
    huge = {**json.loads((saved / "config.json").read_text())["head"], "hidden_size": 10**6, "intermediate_size": 10**7}
    edit_config(saved, head=huge)
    refused(saved, r"has shape \(.*\), not \(.*1000000")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"kind": "hydra"}, "does not describe a head this version knows: unknown head 'hydra'; known: medusa"),
        ({}, "unknown head None"),
        ({"kind": "medusa", "num_heads": "five"}, "does not describe a head"),
        ({"kind": "medusa", "num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"kind": "medusa", "newer": 1}, "unknown medusa head option 'newer'"),
        ({"kind": "medusa", "hidden_size": -5, "vocab_size": 3}, "does not describe a head"),
        ({"kind": "eagle3"}, "does not describe a head"),
        (["medusa"], r"head should be a table of options, not \['medusa'\]"),
        ("medusa", "head should be a table of options, not 'medusa'"),
    ],
)
def test_a_config_that_describes_no_head_is_refused(saved, head, message):
    edit_config(saved, head=head)
    refused(saved, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "config.json is not JSON"),
        (b"{'model_type': 'specheads'}", "config.json is not JSON"),
        (b"\xff\xfe\x00garbage", "config.json is not JSON"),
        (b"[]", r"config.json is not the config of a draft head \(model_type=None\)"),
        (b"{}", r"model_type=None.*a base model is given a head with specheads.convert\(\)"),
        (b'{"model_type": "llama"}', r"model_type='llama'.*specheads.convert\(\)"),
    ],
)
def test_a_config_that_is_none_is_refused(saved, text, message):
    (saved / "config.json").write_bytes(text)
    refused(saved, message)


def test_a_garbled_config_in_the_header_is_refused(saved):
    path = saved / "model.safetensors"
    save_file(load_file(path), path, {"specheads_config": "{garbage"})
    refused(saved, "the header of .*model.safetensors is not JSON")


def test_a_base_model_is_pointed_to_convert(named, base_dir, tmp_path):
    refused(base_dir, r"config of a draft head \(model_type='llama'\); a base model is given a head with .*convert\(\)")
    named.save_pretrained(tmp_path, max_shard_size="20KB")  # in several files
    refused(tmp_path, r"convert\(\)")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt", "model.pth", "last.ckpt", "x.pkl"])
def test_a_pickle_is_not_loaded(saved, name, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (saved / "model.safetensors").unlink()
    torch.save({"head.fc.weight": Bomb()}, saved / name)
    refused(saved, rf"has no model.safetensors, and its pickles \['{name}'\] are not loaded, since a pickle can run")
    assert not (tmp_path / "ran").exists()


def test_a_directory_without_the_files_is_refused(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no model.safetensors: not a head checkpoint, or one that was never finished")
    (saved / "model.safetensors").unlink()
    refused(saved, "has no model.safetensors")


def test_a_weights_file_alone_without_a_config_is_refused(saved):
    path = saved / "model.safetensors"
    save_file(load_file(path), path)
    (saved / "config.json").unlink()
    refused(saved, "has no config.json, nor a config in the header of model.safetensors")


def test_what_does_not_exist_is_refused(saved, tmp_path):
    refused(tmp_path / "nothing", "nothing is not a directory with config.json and model.safetensors, nor a hub id")
    refused("./nothing", "nor a hub id")
    refused(saved / "config.json", "config.json is not a directory with")
    refused("out/run/checkpoint-5", "out/run/checkpoint-5 is neither a directory nor a hub repository")
    refused("someone/some-head", "someone/some-head is neither a directory nor a hub repository with config.json")


# --- saving ---


def test_saving_leaves_other_files_alone(named, tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "optimizer.pt").write_bytes(b"state")
    (tmp_path / "global_step1").mkdir()
    first, second = trained(named, "medusa", 1), trained(named, "eagle", 2)
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path)
    assert same(load_head(named, tmp_path), second)
    assert (tmp_path / "trainer_state.json").read_text() == "{}" and (
        tmp_path / "optimizer.pt"
    ).read_bytes() == b"state"
    assert {p.name for p in tmp_path.iterdir()} == FILES | {"trainer_state.json", "optimizer.pt", "global_step1"}


def test_saving_makes_parent_folders_and_refuses_a_file(named, tmp_path):
    model = trained(named, "medusa")
    model.save_pretrained(str(tmp_path / "a" / "b"))
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == FILES
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file; give a directory to save into"):
        model.save_pretrained(tmp_path / "file")


def test_only_the_main_process_writes(named, tmp_path):
    trained(named, "medusa").save_pretrained(tmp_path / "a", is_main_process=False, push_to_hub=True, repo_id="a/b")
    assert not (tmp_path / "a").exists()


def test_files_can_be_read_by_whom_the_umask_allows(named, tmp_path):
    (tmp_path / "plain").touch()
    trained(named, "medusa").save_pretrained(tmp_path)
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_saving_does_not_touch_model_or_random_numbers(named, tmp_path):
    model = trained(named, "eagle3")
    before, rng = {name: t.clone() for name, t in state(model).items()}, torch.get_rng_state()
    config = model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert all(torch.equal(t, before[name]) for name, t in state(model).items())
    assert torch.equal(torch.get_rng_state(), rng) and model.config.to_dict() == config


@pytest.mark.parametrize("part", ["all", "some", "own"])
def test_parameters_that_a_launcher_holds_in_shards_are_refused(named, tmp_path, part):
    """DeepSpeed ZeRO-3 leaves empty tensors behind."""
    model = trained(named, "eagle3")
    given = {name: torch.empty(0) for name in state(model)} if part == "all" else dict(state(model))
    if part == "some":
        given["head.fc.weight"] = torch.empty(0)
    if part == "own":
        for parameter in model.head.parameters():
            parameter.data = torch.empty(0)
        given = None
    with pytest.raises(
        CheckpointError, match=r"head.fc.weight has shape \(0,\), not .*stage3_gather_16bit_weights"
    ) as e:
        model.save_pretrained(tmp_path / "out", state_dict=given)
    assert "does not hold the whole head" in str(e.value)
    assert not (tmp_path / "out").exists()


def test_shards_that_know_the_whole_are_refused_too(named, tmp_path):
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    model = trained(named, "eagle3")
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model.head)
        with pytest.raises(CheckpointError, match=r"its tensors are shards.*accelerator.get_state_dict\(model\)"):
            model.save_pretrained(tmp_path)
        assert not contents(tmp_path)
        gathered = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state(model).items()}
        model.save_pretrained(tmp_path, state_dict=gathered)
    finally:
        destroy_process_group()
    restored = load_head(named, tmp_path)
    assert all(torch.equal(t, gathered[name]) for name, t in state(restored).items())


def test_a_gathered_state_dict_is_what_is_saved(named, tmp_path):
    model = trained(named, "eagle")
    gathered = {name: t + 1 for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=gathered)
    assert all(torch.equal(t, gathered[name]) for name, t in state(load_head(named, tmp_path)).items())
    assert {path.name for path in tmp_path.iterdir()} == FILES
    for lacking in ({}, model.head.state_dict(), {n: t for n, t in gathered.items() if n != "head.fc.weight"}):
        with pytest.raises(CheckpointError, match=r"missing \[.*'head.fc.weight'"):
            model.save_pretrained(tmp_path, state_dict=lacking)


@pytest.mark.parametrize("by", ["push_to_hub", "save_pretrained"])
def test_pushing_uploads_the_heads_files_alone(named, tmp_path, monkeypatch, by):
    from huggingface_hub import ModelCard
    from transformers.utils import hub

    uploads = []

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": f"someone/{repo_id}"})

        def create_commit(self, repo_id, operations, **kwargs):
            uploads.append((repo_id, {op.path_in_repo: op.path_or_fileobj for op in operations}, kwargs["token"]))
            assert Path(uploads[-1][1]["model.safetensors"]).stat().st_size < 100_000
            return "https://example.org"

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: ModelCard("a card"))
    model = trained(named, "medusa")
    if by == "push_to_hub":
        model.push_to_hub("my-head", token="secret")
    else:
        (tmp_path / "my-head").mkdir()
        (tmp_path / "my-head" / "optimizer.pt").write_bytes(b"private")
        model.save_pretrained(tmp_path / "my-head", push_to_hub=True, token="secret")
        assert same(load_head(named, tmp_path / "my-head"), model)
    [(repo_id, files, token)] = uploads
    assert (repo_id, set(files), token) == ("someone/my-head", FILES | {"README.md"}, "secret")


# --- a save that dies ---

STEPS = [
    (Path, "touch"), (checkpoint, "save_file"), (Path, "chmod"), (os, "fsync"), (os, "replace"), (Path, "write_text"),
]  # fmt: skip


def failing_at(step: int, fail, half: bool):
    """Replace what save() writes with, so that `fail()` comes before its call number `step`, or half-way through."""
    calls = iter(range(10_000))

    def wrapped(function):
        def call(*args, **kwargs):
            if next(calls) == step:
                if half and function.__name__ in ("save_file", "write_text"):
                    function(*args, **kwargs)
                    path = args[1] if function.__name__ == "save_file" else args[0]
                    os.truncate(path, os.path.getsize(path) // 2)
                fail()
            return function(*args, **kwargs)

        return call

    return [(owner, name, wrapped(getattr(owner, name))) for owner, name in STEPS]


def before_and_after(folder):
    """Two heads of one base, told apart by their options as well; the first of them saved."""
    base = tiny_llama()
    old, new = trained(base, "medusa", 1, num_heads=2), trained(base, "medusa", 2, num_heads=3)
    old.save_pretrained(folder / "old")
    return base, old, new


def killed_at_every_step(folder: str) -> None:
    """In a process of its own: for each step of a save, fork, die there, and say what is left of the checkpoint."""
    base, old, new = before_and_after(Path(folder))
    for half in (False, True):
        for start in ("old", "none"):
            step, status = 0, -1
            while status != 0:
                target = Path(folder) / f"{start}-{half}-{step}"
                if start == "old":
                    shutil.copytree(Path(folder) / "old", target)
                if (child := os.fork()) == 0:
                    for owner, name, function in failing_at(step, lambda: os._exit(9), half):
                        setattr(owner, name, function)
                    new.save_pretrained(target)
                    os._exit(0)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                try:
                    model = load_head(base, target)
                    left = "old" if same(model, old) else "new" if same(model, new) else "broken"
                    wanted = old if left == "old" else new
                    left = left if model.head.config == wanted.head.config else "mixed"
                except CheckpointError as error:
                    left = "none" if "has no model.safetensors" in str(error) else f"refused: {error}"
                print(start, half, step, status, left, flush=True)
                step += 1


def test_a_save_that_is_killed_leaves_the_old_checkpoint_or_none(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_checkpoint import *; killed_at_every_step(sys.argv[2])"
    )
    lines = in_new_process(script, str(Path(__file__).parent), str(tmp_path))
    seen = [line.split(maxsplit=4) for line in lines]
    for start in ("old", "none"):
        for half in ("False", "True"):
            states = [left for s, h, _, status, left in seen if (s, h) == (start, half) and status == "9"]
            assert len(states) == 10, "two files, each: made, written, given its mode, flushed, put in place"
            # up to the replacing of the weights file nothing has changed; from then on all of it has
            assert states == [start] * 5 + ["new"] * 5
    assert sum(status == "0" and left == "new" for *_, status, left in seen) == 4


def test_a_save_that_fails_leaves_no_litter(tmp_path, monkeypatch):
    base, _, new = before_and_after(tmp_path)
    whole = contents(tmp_path / "old")

    def full():
        raise OSError(28, "No space left on device")

    for half in (False, True):
        for start in ("old", "none"):
            for step in range(10):
                target = tmp_path / f"{start}-{half}-{step}"
                if start == "old":
                    shutil.copytree(tmp_path / "old", target)
                with monkeypatch.context() as patch:
                    for change in failing_at(step, full, half):
                        patch.setattr(*change)
                    with pytest.raises(OSError, match="No space left"):
                        new.save_pretrained(target)
                assert set(contents(target)) <= FILES
                if step < 5:
                    assert contents(target) == (whole if start == "old" else {})
                else:
                    assert same(load_head(base, target), new)
                new.save_pretrained(target)  # and with room again it goes through
                assert same(load_head(base, target), new)


@pytest.mark.parametrize("loader", [SpecModel.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_new_weights_beside_an_old_config_are_the_new_checkpoint(named, tmp_path, loader):
    old, new = trained(named, "medusa", 1, num_heads=2), trained(named, "eagle", 2)
    old.save_pretrained(tmp_path / "a")
    new.save_pretrained(tmp_path / "b")
    shutil.copy(tmp_path / "b" / "model.safetensors", tmp_path / "a")
    restored = loader(tmp_path / "a")
    assert same(restored, new) and restored.head.config == new.head.config


def test_a_loaded_head_does_not_follow_its_file(named, tmp_path):
    """A file that is written over in place must not change the weights of a running model."""
    model = trained(named, "medusa")
    model.save_pretrained(tmp_path)
    restored = load_head(named, tmp_path)
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size // 2)
        file.write(b"\0" * (size // 2))
    assert same(restored, model)


def test_the_public_name_is_the_error_that_is_raised():
    assert specheads.CheckpointError is CheckpointError and issubclass(CheckpointError, ValueError)
