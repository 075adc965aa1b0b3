"""Claims about specheads/models/checkpoint.py: a head comes back bit for bit, whole, and in the dtype asked for."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import specheads
from specheads import CheckpointError, SpecConfig, SpecModel, load_head
from specheads.heads import HEADS
from tests.reference.slow_heads import LATENT
from tests.support.heads_on_disk import FILES, IDS, digest, in_new_process, same, state, trained
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_llama

pytestmark = pytest.mark.usefixtures("offline")

CASES = [
    ("medusa", {"num_heads": 2}), ("hydra", {"prefix_layer": True, "num_heads": 2}), ("eagle", {"num_layers": 2}),
    ("eagle3", {"draft_vocab_size": 40, "norm_features": True, "norm_output": True}),
    ("parallel", {"draft_vocab_size": 40, "confidence": True}),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("head", "options"), CASES)
def test_every_way_of_loading_restores_the_head_bit_for_bit(named, tmp_path, head, options):
    model = trained(named, head, **options)
    model.save_pretrained(tmp_path / "head")
    plain = model.generate(IDS, max_new_tokens=6)
    trained_parameters = [p.requires_grad for p in model.head.parameters()]
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
        assert [p.requires_grad for p in restored.head.parameters()] == trained_parameters
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
        "from tests.support.heads_on_disk import IDS, digest\n"
        "for folder in sys.argv[2:]:\n"
        "    model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "    print(digest(model), model.generate(IDS, max_new_tokens=6).tolist())\n"
    )
    folders = [str(tmp_path / head) for head, _ in CASES]
    lines = in_new_process(script, str(ROOT), *folders)
    assert lines == [f"{digest(m)} {m.generate(IDS, max_new_tokens=6).tolist()}" for m in models]


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
        "head_dim": 6, "intermediate_size": 24, "rms_norm_eps": 1e-3, "draft_vocab_size": 19,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0},
        "taps": (4,) if head in ("eagle", "mtp") else (1, 4, 6), "layer_indices": (1,),
        "target_config": {
            "model_type": "qwen3", "hidden_size": 32, "vocab_size": 97, "intermediate_size": 24, "head_dim": 6,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        },
        "tree": ((0,), (1,), (0, 0)), "loss": "lk",
        "decay": 0.5, "mask_token_id": 7, "anchors": 3,
        "dpace": 0.5 if head == "parallel" else None, "norm_before_fc": False,  # which do not go with others here
        "hidden_act": "gelu", "sliding_window": 11, "layer_types": None if head == "hydra" else (
            "full_attention", *["sliding_attention"] * {"eagle": 1, "eagle3": 1, "parallel": 2}.get(head, 0)
        ),
        "causal_windows": True, "conv_taps": 2, "conv_group": 8, "markov_type": "gated", "own_mask": True,
        "logit_cap": 3.0, "logit_scale": 0.5, "mrope_axes": (0, 2, 1), **dict.fromkeys(LATENT.keys() - {"head_dim"}),
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


def test_latent_attention_comes_back(named, tmp_path):
    model = trained(named, "eagle3", **LATENT)
    model.save_pretrained(tmp_path)
    restored = SpecModel.from_pretrained(tmp_path)
    assert restored.head.config == model.head.config and restored.head.config.kv_lora_rank == LATENT["kv_lora_rank"]
    assert same(restored, model)


def test_a_checkpoint_from_before_an_option_keeps_its_meaning(named, tmp_path):
    """EAGLE-3 heads were as published before norm_before_residual was an option, and it is now on in new ones."""
    model = trained(named, "eagle3", draft_vocab_size=40, norm_before_residual=False)
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text("utf8"))
    assert content["head"].pop("norm_before_residual") is False
    (tmp_path / "config.json").write_text(json.dumps(content), "utf8")
    assert SpecModel.from_pretrained(tmp_path).head.config == model.head.config
    assert specheads.convert(named, "eagle3").head.config.norm_before_residual


def test_a_draft_vocabulary_comes_back(named, tmp_path):
    model = trained(named, "eagle3", draft_vocab_size=40)
    model.save_pretrained(tmp_path)
    head = SpecModel.from_pretrained(tmp_path).head
    assert torch.equal(head.d2t, model.head.d2t) and head.d2t.dtype == torch.int64 and head.d2t.any()
    assert torch.equal(head.t2d, model.head.t2d) and head.t2d.dtype == torch.bool and head.t2d.sum() == 40
    assert torch.equal(torch.arange(40) + head.d2t, head.t2d.nonzero().squeeze(1))


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
def test_a_head_keeps_the_dtype_it_was_saved_in_where_it_is_told_to(named, tmp_path, saved):
    model = trained(named, "eagle3", dtype=saved)
    model.save_pretrained(tmp_path)
    assert same(load_head(named, tmp_path, dtype="auto"), model)
    assert same(load_head(tiny_llama().to(torch.bfloat16), tmp_path, dtype="auto"), model)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_head_takes_the_dtype_of_its_base(named, base_dir, tmp_path, saved):
    model = trained(named, "eagle3", dtype=saved)
    model.save_pretrained(tmp_path)
    assert same(load_head(named, tmp_path), model.float())  # to the last bit
    for dtype in (torch.bfloat16, torch.float64):
        base = tiny_llama().to(dtype)
        assert {p.dtype for p in load_head(base, tmp_path).head.parameters()} == {dtype} == {base.dtype}
    by_name = SpecModel.from_pretrained(tmp_path, base=base_dir)
    assert by_name.dtype == by_name.head.dtype == torch.float32


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


@pytest.mark.parametrize("head", ["medusa", "eagle3"])
def test_a_head_beside_an_offloaded_output_layer_is_where_that_computes(named, tmp_path, head):
    model = trained(named, head)
    model.save_pretrained(tmp_path / "head")
    model.export(tmp_path / "theirs", "vllm")
    offloaded = {"device_map": {"model": "cpu", "lm_head": "disk"}, "offload_folder": tmp_path / "off"}
    for folder, base in (("head", None), ("theirs", named.name_or_path)):
        restored = SpecModel.from_pretrained(tmp_path / folder, base=base, **offloaded)
        assert restored.base.lm_head.weight.is_meta and same(restored, model)
        greedy = {"max_new_tokens": 12, "do_sample": False}
        assert torch.equal(restored.generate(IDS[:1], draft="head", **greedy), named.generate(IDS[:1], **greedy))


def test_options_that_would_do_nothing_are_refused(named, tmp_path):
    trained(named, "eagle").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\['device_map'\] would have no effect on a base that is already in memory"):
        load_head(named, tmp_path, device_map="auto")


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
