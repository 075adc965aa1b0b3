"""Claims about convert(): what it takes, what it refuses, and what it leaves of the base."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from specheads import Eagle3Config, EagleConfig, HydraConfig, MedusaConfig, UnsupportedModel, convert
from tests.reference.slow_heads import LATENT
from tests.support.tiny_models import tiny_llama, with_adapter

HEADS = ("medusa", "hydra", "eagle", "eagle3", "mtp", "parallel")
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))


# --- naming a head ---


@pytest.mark.parametrize(
    ("head", "config"),
    [
        ("medusa", MedusaConfig()),
        ("eagle", EagleConfig()),
        ("eagle3", Eagle3Config()),
        (MedusaConfig(num_heads=2), MedusaConfig(num_heads=2)),
        ([("medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1})], MedusaConfig(num_heads=2, num_layers=1)),
        ([["medusa", {"num_heads": 2}]], MedusaConfig(num_heads=2)),
        ([("hydra", {"hydra_num_heads": 2, "hydra_num_layers": 3})], HydraConfig(num_heads=2, num_layers=3)),
        ([("eagle", {"eagle_num_layers": 1})], EagleConfig(num_layers=1)),
        ([("eagle", {"eagle_num_layers": 2})], EagleConfig(num_layers=2)),
    ],
)
def test_every_way_of_naming_a_head_gives_that_head(base, head, config):
    model = convert(base, head)
    assert model.head.config == config.with_base_defaults(base.config)
    assert model.config.head_config() == model.head.config


def test_options_beside_a_name_and_in_a_list_add_up(base):
    assert convert(base, [("medusa", {"num_heads": 2})], num_layers=2).head.config.num_layers == 2
    assert convert(base, "medusa", medusa_num_heads=3).head.config.num_heads == 3


def test_sizes_left_out_come_from_the_base():
    wide = tiny_llama(hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, vocab_size=61)
    config = convert(wide, "eagle3").head.config
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (48, 80, 61)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 8)
    assert config.draft_vocab_size == 61
    assert config.rope_parameters == wide.config.rope_parameters
    assert config.rms_norm_eps == wide.config.rms_norm_eps
    assert convert(wide, "eagle").head.config.taps == (8,)
    assert convert(wide, "medusa").head.config.tap == 8


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        ("medusa", {"num_head": 3}, "unknown medusa head option 'num_head'; did you mean 'num_heads'?"),
        ("eagle", {"eagle_num_layer": 1}, "did you mean 'eagle_num_layers'?"),
        ("eagle3", {"zzz": 1}, "unknown eagle3 head option 'zzz'; known: .*taps"),
        ("medusa", {"num_heads": 2, "medusa_num_heads": 2}, "'num_heads' is given twice"),
        ("medusa", {"num_heads": 0}, "num_heads=0 "),
        (MedusaConfig, {}, "MedusaConfig is the class of a head's config; give one of its objects: MedusaConfig()"),
        ("medussa", {}, "unknown head 'medussa'; did you mean 'medusa'?"),
        (MedusaConfig(), {"num_heads": 2}, r"options \['num_heads'\] next to a head config"),
        ([("medusa", {}), ("eagle", {})], {}, "one entry"),
        (["medusa"], {}, r"\[\(name, options\)\]"),
        ("medusa", {"tap": 9}, "tap=9 does not exist: the base has 8 layers"),
        ("medusa", {"tap": -1}, "tap=-1 does not exist"),
        ("hydra", {"decay": 0}, "hydra head option decay=0 "),
        ("hydra", {"head_dim": 8}, r"\['head_dim'\] are sizes of the prefix layer: give prefix_layer=true"),
        ("eagle3", {"taps": [1, 2, 10]}, "tapped layer 10 does not exist: the base has 8 layers"),
        ("eagle", {"taps": [-1]}, "tapped layer -1 does not exist"),
        ("eagle", {"taps": [1, 2]}, "one layer"),
        ("eagle3", {"draft_vocab_size": 98}, "draft_vocab_size=98 exceeds the base's vocabulary of 97"),
        ("eagle3", {"norm_features": True, "norm_before_fc": True}, "one of them, not both"),
        ("eagle3", {"v_head_dim": 8}, "v_head_dim is of latent attention: give kv_lora_rank too"),
        ("eagle3", {"kv_lora_rank": 8}, "kv_lora_rank=8 needs head_dim, qk_rope_head_dim and v_head_dim too"),
        ("eagle3", {**LATENT, "v_head_dim": 11}, "v_head_dim=11: with head_dim=10 .* the second at most as large"),
        ("eagle3", {**LATENT, "qk_norm": True}, "qk_norm: blocks with kv_lora_rank have none"),
        ("medusa", {"dtype": "int8"}, "dtype='int8' is not a floating point type"),
        ("medusa", {"dtype": "bf17"}, "dtype='bf17' is not a floating point type"),
    ],
)
def test_a_wrong_head_is_refused_with_what_would_be_right(base, head, options, message):
    with pytest.raises(ValueError, match=message):
        convert(base, head, **options)


# --- the base ---


@pytest.mark.parametrize("size", [{"hidden_size": 48}, {"vocab_size": 61}])
@pytest.mark.parametrize("head", HEADS)
def test_a_config_of_another_bases_sizes_is_refused(base, head, size):
    config = convert(base, head).head.config
    [(name, value)] = size.items()
    with pytest.raises(
        ValueError, match=f"{head} head option {name}={getattr(config, name)} is not the base's, {value}"
    ):
        convert(tiny_llama(**size), config)


def test_converting_twice_is_refused(base):
    with pytest.raises(ValueError, match=r"already has a head; convert\(model.base"):
        convert(convert(base, "medusa"), "eagle")


@pytest.mark.parametrize("wrong", [None, nn.Linear(2, 2), 7])
def test_a_base_that_is_no_model_is_refused(wrong):
    with pytest.raises(TypeError, match=f"not {type(wrong).__name__}"):
        convert(wrong, "medusa")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_base_can_be_given_by_name(base, base_dir, kind):
    model = convert(kind(base_dir), "eagle")
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    assert model.config.base_model_name_or_path == str(base_dir)


def test_the_base_is_frozen_and_only_the_head_is_trained():
    base = tiny_llama(attention_dropout=0.5)
    base.train()
    model = convert(base, "eagle")
    assert not any(p.requires_grad for p in base.parameters())
    assert all(p.requires_grad for p in model.head.parameters())
    assert not base.training
    model.train()
    assert model.training and model.head.training
    assert not any(module.training for module in base.modules()), "the base's dropout must stay off"
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is None for p in base.parameters())
    assert all(p.grad is not None for p in model.head.parameters())
    assert model.num_parameters(only_trainable=True) == sum(p.numel() for p in model.head.parameters())
    assert model.num_parameters() == base.num_parameters() + model.num_parameters(only_trainable=True)


def test_converting_does_not_change_the_base():
    base = tiny_llama()
    before = {name: t.clone() for name, t in base.state_dict().items()}
    for head in HEADS:
        convert(base, head)
    assert all(torch.equal(t, before[name]) for name, t in base.state_dict().items())


def test_two_heads_share_one_base(base):
    first, second = convert(base, "medusa"), convert(base, "eagle")
    assert first.base is second.base is base
    plain = base.generate(IDS, max_new_tokens=6, do_sample=False)
    for model in (first, second, first):
        assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), plain)
    assert {name.split(".")[0] for name in first.head_state_dict()} == {"head"}
    assert first.head_state_dict().keys() != second.head_state_dict().keys()


@pytest.mark.parametrize("head", HEADS)
def test_a_base_on_meta_gets_a_head_on_meta(head):
    with torch.device("meta"):
        base = tiny_llama()
    model = convert(base, head)
    assert model.device.type == "meta"
    assert {t.device.type for t in model.head.state_dict().values()} == {"meta"}
    assert model.config.base_fingerprint["weights"] is None


@pytest.mark.parametrize("head", HEADS)
def test_a_peft_base_keeps_its_adapter(base, head):
    adapted = with_adapter()
    plain = adapted.generate(input_ids=IDS, max_new_tokens=8, do_sample=False)
    assert not torch.equal(plain, base.generate(IDS, max_new_tokens=8, do_sample=False)), "the adapter does nothing"
    model = convert(adapted, head)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), plain)
    assert model(IDS, labels=IDS).loss.isfinite()
    assert not any(p.requires_grad for p in adapted.parameters())


def test_a_peft_base_of_virtual_tokens_is_refused():
    from peft import PromptTuningConfig, get_peft_model

    prompted = get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModel, match="PromptTuningConfig puts virtual tokens before each prompt"):
        convert(prompted, "medusa")


class Int8Linear(nn.Module):
    """A linear layer as quantisers leave it: integer weights that no gradient can reach, and scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("head", HEADS)
def test_a_quantised_base_is_served(head):
    base = tiny_llama()
    for layer in base.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(part, name, Int8Linear(module))
    model = convert(base, head)
    assert {p.dtype for p in model.head.parameters()} == {torch.float32}
    assert max(p.abs().max() for p in model.head.parameters()) < 20, "integer codes were taken for weights"
    plain = base.generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), plain)
    assert model(IDS, labels=IDS).loss.isfinite()


# --- dtype and device ---


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "bfloat16", "torch.float16", torch.float64])
def test_the_head_has_the_dtype_asked_for(dtype):
    base = tiny_llama().to(torch.bfloat16)
    model = convert(base, "eagle3", dtype=dtype)
    wanted = {None: torch.float32, "bfloat16": torch.bfloat16, "torch.float16": torch.float16}.get(dtype, dtype)
    assert {p.dtype for p in model.head.parameters()} == {wanted}
    assert (model.head.d2t.dtype, model.head.t2d.dtype) == (torch.int64, torch.bool)
    assert model.dtype == base.dtype == torch.bfloat16
    assert model.generate(IDS, max_new_tokens=4).shape == (2, 28)
    assert model(IDS, labels=IDS).loss.isfinite()


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.to("cpu").half()])
def test_casting_a_model_casts_base_and_head(cast):
    model = convert(tiny_llama(), "eagle3")
    model.generate(IDS, max_new_tokens=3)  # what decoding has cached must follow the cast
    model = cast(model)
    assert model.dtype == model.head.dtype != torch.float32
    assert model.device == model.base.device == torch.device("cpu")
    assert model.generate(IDS, max_new_tokens=3).shape == (2, 27)


def test_eagle3_starts_with_the_bases_output_rows_and_final_norm(base):
    base = copy.deepcopy(base)
    with torch.no_grad():
        base.model.norm.weight.copy_(torch.linspace(0.5, 2, len(base.model.norm.weight)))
    head = convert(base, "eagle3", draft_vocab_size=40).head
    assert torch.equal(head.lm_head.weight, base.lm_head.weight[head.target_ids])
    ratio = head.norm.weight / base.model.norm.weight  # one factor: the norm is softened (test_soft_start)
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert 0 < ratio[0] <= 1


def test_taps_that_a_base_of_few_layers_repeats_are_named(caplog):
    assert convert(tiny_llama(num_hidden_layers=3), "eagle3").head.config.taps == (1, 2, 3) and not caplog.text
    for layers, taps in ((1, (1, 1, 1)), (2, (1, 1, 2))):
        caplog.clear()
        assert convert(tiny_llama(num_hidden_layers=layers), "eagle3").head.config.taps == taps
        (told,) = [record.getMessage() for record in caplog.records]
        assert f"a base of {layers} layers has too few for 3 taps" in told and str(taps)[1:-1] in told
