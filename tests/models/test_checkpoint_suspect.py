"""Claims about our own files, which are as suspect as a stranger's: what cannot be decoded is refused at load, with one
short line, before memory is taken; what a user may edit works."""

from __future__ import annotations

import json
import struct
from dataclasses import fields

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specheads import CheckpointError, SpecModel, load_head
from specheads.heads import HEADS
from specheads.heads.limits import bounds_of
from specheads.models.base.lora import JointConfig, attach
from tests.reference import foreign
from tests.support.command_line import run
from tests.support.heads_on_disk import IDS, edit_config, kept_files, same, trained
from tests.support.tiny_models import tiny_llama

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def saved(named, tmp_path):
    trained(named, "eagle3", draft_vocab_size=40).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def edit(folder, **tensors):
    """Put other tensors into a weights file, of ours (`head.` before each name) or a foreign one."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    found = load_file(path)
    prefix = "head." if any(name.startswith("head.") for name in found) else ""
    for name, change in tensors.items():
        name = name if name in found else prefix + name.replace("__", ".")
        found[name] = change(found[name].clone())
    save_file(found, path, metadata)


def refused(folder, base, message, **options):
    with pytest.raises(CheckpointError, match=message) as error:
        load_head(base, folder, **options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1500
    return str(error.value)


def put(at, value):
    def change(tensor):
        tensor.view(-1)[at] = value
        return tensor

    return change


# --- The draft vocabulary ---


VOCABULARIES = [
    ("d2t", put(39, 1000), r"d2t names token 1039 or \d+ of 97"),
    ("d2t", put(0, -1), r"d2t names token \d+ or -1 of 97"),
    ("d2t", put(5, 2**62), "d2t names token 4611686018427387909"),
    ("d2t", lambda d2t: d2t[0] - torch.arange(40), "d2t names 39 tokens twice"),
    ("t2d", lambda t2d: ~t2d, "t2d and .*d2t do not name the same 40 tokens"),
]


@pytest.fixture
def two_forms(saved, tmp_path):
    """The folders of a head of ours and of a foreign one."""
    foreign.eagle3(tmp_path / "foreign", "vllm")
    return saved, tmp_path / "foreign"


def test_a_draft_vocabulary_outside_the_bases_is_refused(named, two_forms):
    for folder in two_forms:
        load_head(named, folder)
        for name, change, message in VOCABULARIES:
            with kept_files(folder):
                edit(folder, **{name: change})
                refused(folder, named, message)


def test_a_whole_draft_vocabulary_is_not_reordered(named, tmp_path):
    trained(named, "medusa").save_pretrained(tmp_path)
    edit(tmp_path, d2t=lambda d2t: torch.arange(97).flip(0) - torch.arange(97))
    refused(tmp_path, named, "head.d2t reorders the whole vocabulary")


# --- Options ---


@pytest.mark.parametrize("kind", HEADS)
def test_every_number_of_a_head_has_bounds_that_its_message_gives(kind):
    config = HEADS[kind].Config
    bounds, needs = bounds_of(config), {"prefix_layer": True} if kind == "hydra" else {}
    for option in fields(config):
        if not option.type.startswith(("int", "tuple[int, ...]")):
            continue
        least, most = bounds[option.name]
        for value, message in ((most + 1, f"must be at most {most}"), (10**400, "must be at most"),
                               (least - 1, f"must be at least {least}"), ("8", "whole number"), (2.5, "whole number"),
                               (True, "whole number"), ({}, "number|list")):  # fmt: skip
            given = (value,) if option.type.startswith("tuple") else value
            with pytest.raises(ValueError, match=f"{kind} head option {option.name}=.*({message})"):
                config(**{**needs, option.name: given})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("medusa", {"decay": float("nan")}, "decay=nan must be a finite number"),
        ("medusa", {"loss": 5}, "loss=5 must be text"),
        ("eagle", {"attention_bias": "no"}, "attention_bias='no' must be true or false"),
        ("eagle", {"taps": list(range(65))}, "taps=.* must be a list of 64 whole numbers at most"),
        ("eagle", {"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 "),
        ("eagle", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 0.0,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
         "gives no frequencies"),
        ("medusa", {"tree": ((0,), (0, 0), (0, 0, 0)), "num_heads": 2}, "is 3 deep, and such a head drafts 2 tokens"),
        ("medusa", {"tree": ((40,),), "draft_vocab_size": 40}, "has rank 40, and a node of such a head has 40 at most"),
        ("medusa", {"tree": tuple((i,) for i in range(2000))}, "has 2000 choices; it must have fewer than 1024"),
        ("medusa", {"tree": ((0.0,),)}, "must be a list of paths"),
        ("parallel", {"tree": ((0,), (0, 0)), "block_size": 2, "sample_from_anchor": False}, "2 deep"),
        ("eagle3", {"draft_depth": 10**12}, "draft_depth=1000000000000 "),
    ],
)  # fmt: skip
def test_options_that_no_head_has_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        HEADS[kind].Config.from_options(options)


def test_a_checkpoint_with_such_options_is_refused_at_load(named, saved):
    head = json.loads((saved / "config.json").read_text())["head"]
    for option, value, message in (
        ("draft_depth", 10**12, "draft_depth=1000000000000 "),
        ("taps", [2, 4, 10], "tapped layer 10 does not exist"),
        ("taps", [2, 4, -1], "tapped layer -1 does not exist"),
        ("taps", None, "sizes are missing or null, among .*taps"),
        ("tree", [[0], [97]], "has rank 97"),
    ):
        edit_config(saved, head={**head, option: value})
        refused(saved, named, message)


def test_a_config_or_a_header_of_many_megabytes_is_not_read(named, saved):
    path, text = saved / "model.safetensors", (saved / "config.json").read_text()
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    padded = whole[8 : 8 + size] + b" " * (20 << 20)
    path.write_bytes(struct.pack("<Q", len(padded)) + padded + whole[8 + size :])
    refused(saved, named, r"has a header of 20,\d+,\d+ bytes; a head's has at most 16,777,216")
    path.write_bytes(whole)
    (saved / "config.json").write_text(text + " " * (5 << 20))
    refused(saved, named, r"has \S* ?5,24\d,\d+ bytes; expected at most 4,194,304")
    (saved / "config.json").write_text(text)
    edit_config(saved, architectures=["x" * (5 << 20)])
    (saved / "config.json").write_text(text)
    refused(saved, named, "header of .* has a config of more than 4,194,304 bytes")


# --- Values ---


def test_weights_that_are_not_finite_are_refused_unless_allowed(named, two_forms, tmp_path, capsys):
    text = named.generate(IDS, max_new_tokens=4, do_sample=False)
    for folder in two_forms:
        for value in (float("nan"), float("inf"), -float("inf")):
            edit(folder, fc__weight=put(7, value), norm__weight=put(3, value))
            refused(folder, named, r"NaN or Inf in \S*fc\.weight, \S*norm\.weight; .*allow_nonfinite=True")
            model = load_head(named, folder, allow_nonfinite=True)
            assert torch.equal(model.generate(IDS, max_new_tokens=4), text)
        given = "import", folder, tmp_path / f"out {folder.name}", "--base", named.name_or_path
        code, _, err = run(capsys, *given)
        assert code != 0 and "NaN or Inf" in err
        assert run(capsys, *given, "--allow-nonfinite")[0] == 0 and (given[2] / "config.json").is_file()


def test_tensors_of_several_dtypes_are_read_in_the_widest_and_decode(named, tmp_path):
    model = trained(named, "eagle3")
    model.head.lm_head.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    restored = load_head(named, tmp_path)
    assert same(restored, model.float()) and restored.head.lm_head.weight.dtype == torch.float32
    assert torch.equal(restored.generate(IDS, max_new_tokens=4), named.generate(IDS, max_new_tokens=4, do_sample=False))


def test_adapters_that_are_not_finite_are_never_taken(tmp_path):
    trained(tiny_llama(), "medusa", num_heads=2, lora={"r": 2, "target_modules": ("q_proj",)}).save_pretrained(tmp_path)
    edit(tmp_path, **{"base.model.layers.3.self_attn.q_proj.lora_B.default.weight": put(0, float("nan"))})
    for allowed in (False, True):
        message = r"NaN or Inf in base.model.layers.3.*lora_B.default.weight; copy or train it again"
        refused(tmp_path, tiny_llama(), message + ("$" if allowed else ", or"), allow_nonfinite=allowed)


def test_a_dtype_that_no_head_has_is_refused(named, saved):
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int16):
        edit(saved, fc__weight=lambda t, to=dtype: t.to(to))
        refused(
            saved, named, r"head.fc.weight is (quantised \([A-Z0-9_]+\), and heads|I16; expected F64, F32, F16, BF)"
        )


# --- Strings of any length ---

LONG = "x\n" * 50_000


def test_a_tensor_name_of_any_length_is_shortened(named, two_forms):
    for folder in two_forms:
        path = folder / "model.safetensors"
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        save_file({**tensors, LONG: torch.ones(1)}, path, metadata)
        assert "…" in refused(folder, named, "unexpected|unknown")
        save_file({**tensors, LONG: torch.ones(1, dtype=torch.uint8)}, path, metadata)
        assert "…" in refused(folder, named, r"is quantised \(U8\)")
        save_file({**tensors, LONG: torch.full((1,), torch.nan)}, path, metadata)
        refused(folder, named, "unexpected|unknown")


def test_an_option_or_entry_of_any_length_is_shortened(named, saved):
    head = json.loads((saved / "config.json").read_text())["head"]
    options = [
        {"kind": LONG}, {LONG: 1}, {"num_layers": LONG}, {"loss": LONG}, {"loss": f"ce:{LONG}"}, {"num_layers": [LONG]},
        {"rope_parameters": {"rope_type": LONG}}, {"rope_parameters": {"rope_type": "default", LONG: 1}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": LONG}}, {"tree": [[LONG]]}, {"taps": [LONG] * 3},
    ]  # fmt: skip
    entries = [
        {"model_type": LONG}, {"base_model_name_or_path": LONG}, {"base_revision": [LONG]}, {"joint": LONG},
        {"joint": {LONG: 1}}, {"joint": {"r": LONG}}, {"joint": {"base_loss": LONG}}, {"base_fingerprint": {LONG: 1}},
        {"base_fingerprint": {"model_type": LONG}}, {"base_quantization": LONG},
    ]  # fmt: skip
    for change in [*({"head": {**head, **option}} for option in options), *entries]:
        with kept_files(saved):
            edit_config(saved, **change)
            refused(saved, named, "does not describe a head" if "head" in change else ".")


# --- What config.json and the header of the weights file say ---


def edited(folder, **changes):
    """config.json alone, as a user edits it."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_base_named_in_config_json_is_the_one_that_is_loaded(named, saved, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "other")
    edited(saved, base_model_name_or_path="../other")
    model = SpecModel.from_pretrained(saved)
    assert model.base.name_or_path == str(tmp_path / "other")
    model.save_pretrained(tmp_path / "again")
    assert SpecModel.from_pretrained(tmp_path / "again").base.name_or_path == str(tmp_path / "other")
    edited(saved, base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match="give it with base"):
        SpecModel.from_pretrained(saved)


def test_a_revision_goes_with_the_base_that_is_named_beside_it(saved, monkeypatch):
    asked = []

    def from_pretrained(name, **kwargs):
        asked.append((name, kwargs.get("revision")))
        return tiny_llama()

    monkeypatch.setattr("specheads.models.checkpoint.load_language_model", from_pretrained)
    monkeypatch.setattr("specheads.models.checkpoint.hub_options", lambda name, **given: {})
    edit_config(saved, base_revision="abc", base_model_name_or_path="org/one")
    SpecModel.from_pretrained(saved)
    edited(saved, base_model_name_or_path="org/two")
    SpecModel.from_pretrained(saved)
    edited(saved, base_revision="def")
    SpecModel.from_pretrained(saved)
    edited(saved, base_model_name_or_path="org/one")
    SpecModel.from_pretrained(saved)
    assert asked == [("org/one", "abc"), ("org/two", None), ("org/two", "def"), ("org/one", "def")]


def test_other_options_in_config_json_are_told_of_and_do_not_count(named, saved, hf_log):
    load_head(named, saved)
    assert "differs from config.json" not in hf_log.text
    head = json.loads((saved / "config.json").read_text())["head"]
    edited(saved, head={**head, "draft_depth": 9, LONG: 1})
    assert load_head(named, saved).head.config.draft_depth == 5
    said = next(record.getMessage() for record in hf_log.records if "differs from config.json" in record.getMessage())
    assert (
        "the header of model.safetensors differs from config.json, and the header counts: head.draft_depth is 5, not 9"
        in said
    )
    assert len(said) < 1000 and "\n" not in said


def test_a_key_that_is_a_methods_name_is_refused_as_any_unknown_one(named, saved):
    edit_config(saved, to_diff_dict=5, head_config=7, eos_token_id="x", num_labels=-1)
    refused(saved, named, "head_config, num_labels, to_diff_dict")


# --- Adapters ---


def test_adapters_of_several_dtypes_are_read_in_the_widest_and_decode(tmp_path):
    model = trained(tiny_llama(), "medusa", num_heads=2, lora={"r": 2, "target_modules": ("q_proj",)})
    model.save_pretrained(tmp_path)
    edit(tmp_path, **{"base.model.layers.3.self_attn.q_proj.lora_B.default.weight": lambda t: t.bfloat16()})
    restored = load_head(tiny_llama(), tmp_path)
    assert same(restored, model)
    text = restored.base.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(restored.generate(IDS, max_new_tokens=4), text)


def test_adapters_that_fit_no_module_leave_the_base_as_it_was():
    base = tiny_llama()
    with pytest.raises(ValueError, match=r"adapters cannot be added to the base: Target modules .*not found"):
        attach(base, JointConfig(r=2, target_modules=("nothing",)))
    attach(base, JointConfig(r=2, target_modules=("q_proj",)))


def test_a_regular_expression_of_a_stranger_is_not_run(named, tmp_path):
    base = tiny_llama()
    model = trained(base, "medusa", num_heads=2, lora={"r": 2, "target_modules": ("q_proj",)})
    model.save_pretrained(tmp_path)
    joint = json.loads((tmp_path / "config.json").read_text())["joint"]
    edit_config(tmp_path, joint={**joint, "target_modules": "(([a-z._0-9])+)+#"})  # years on a name of 30 letters
    assert same(load_head(tiny_llama(), tmp_path), model)
