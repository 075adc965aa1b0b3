"""ModelOpt's modes and configs: which head they make here, what is refused, and what is exported."""

from pathlib import Path

import pytest
import torch

from specheads.compat import modelopt as mto
from specheads.compat import modelopt as mtsp
from specheads.compat.modelopt.config import read_mode
from tests.support.modelopt_scripts import EAGLE, SIZES, greedy, small
from tests.support.tiny_models import tiny_llama


def options_of(mode):
    base = small().config
    return read_mode(mode, base)


def test_the_default_eagle_is_modelopts():
    for mode in ("eagle", mtsp.EAGLE3_DEFAULT_CFG, [("eagle", {"eagle_architecture_config": {}})]):
        kind, options = options_of(mode)
        assert kind == "eagle3" and options == {
            "num_layers": 1, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "steps": 3,
            "step_decay": 0.9, "draft_vocab_size": 97, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "norm_before_residual": False,
        }  # fmt: skip
    assert options_of(mtsp.EAGLE1_DEFAULT_CFG)[0] == options_of("eagle1")[0] == "eagle"
    assert options_of("medusa") == ("medusa", {"num_heads": 2})


def test_options_of_modelopts_recipes_and_examples_arrive():
    whole = {  # what recipe.eagle.model_dump() gives
        "eagle_offline": False, "eagle_hidden_state_distillation": False, "eagle_self_logit_distillation": True,
        "eagle_freeze_base_model": True, "eagle_report_acc": True, "eagle_reuse_base_decoder": False,
        "eagle_loss_decay_factor": 0.7, "eagle_decoder_type": "llama", "eagle_ttt_steps": 2,
        "eagle_mix_hidden_states": False, "eagle_use_torch_compile": True, "eagle_enable_nvtx": False,
        "eagle_export_rope_scaling": {"rope_type": "yarn", "factor": 32.0}, "eagle_base_lora": False,
        "eagle_base_lora_rank": 64, "eagle_base_lora_target_modules": None, "eagle_base_lora_alpha": 16.0,
        "eagle_base_lora_preservation_loss_weight": 0.1, "eagle_base_lora_warmup_steps": 0,
        "eagle_base_lora_start_layer": None, "eagle_base_lora_logits_detach_prob": 0.5,
        "eagle_architecture_config": {
            **SIZES, "hidden_size": 32, "vocab_size": 97, "draft_vocab_size": 40, "max_position_embeddings": 512,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "num_hidden_layers": 2, "torch_dtype": "bfloat16",
            "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}, "rope_theta": 5e5, "initializer_range": 0.02,
        },
    }  # fmt: skip
    held = small()
    mtsp.convert(held, [("eagle", whole)])
    config = held.eagle_config
    assert (config.steps, config.step_decay, config.num_layers, config.taps) == (2, 0.7, 2, (1, 2, 4))
    assert (config.head_dim, config.intermediate_size, config.draft_vocab_size) == (8, 48, 40)
    assert config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["rope_theta"] == 5e5
    assert held.eagle_config.draft_vocab_size < held.eagle_config.vocab_size


def test_the_last_layer_by_its_output_is_the_state_before_the_norm():
    held = small()
    last = held.config.num_hidden_layers - 1
    shape = {**SIZES, "eagle_aux_hidden_state_layer_ids": [0, last]}
    mtsp.convert(held, [("eagle", {"eagle_architecture_config": shape})])
    assert held.eagle_config.taps == (1, last + 2)


def test_a_draft_vocabulary_is_loaded_from_a_d2t_file(tmp_path):
    shape = {**SIZES, "draft_vocab_size": 4}
    ids = torch.tensor([90, 3, 50, 7])  # the most frequent first, as their script writes them
    torch.save(ids - torch.arange(4), tmp_path / "d2t.pt")
    held = small()
    mtsp.convert(held, [("eagle", {"eagle_architecture_config": shape})])
    with pytest.raises(FileNotFoundError, match="draft_vocab_size=4 of 97"):
        mtsp.plugins.HFEagleModel.load_draft_vocab_cache(held, None)
    with pytest.raises(ValueError, match="d2t has shape"):
        held.eagle_module.d2t = torch.zeros(5, dtype=torch.long)
    mtsp.plugins.HFEagleModel.load_draft_vocab_cache(held, str(tmp_path / "d2t.pt"))
    assert torch.equal(held.eagle_module.d2t, ids - torch.arange(4)) and held.head.t2d.nonzero().flatten().tolist() == [
        3, 7, 50, 90,
    ]  # fmt: skip
    assert torch.equal(held.head.lm_head.weight, held.base.lm_head.weight[ids])
    held.save_pretrained(tmp_path / "head")
    assert torch.equal(greedy(held), greedy(held, draft=False))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eagle_offline": True}, "eagle_offline=True is not supported, only False; `specheads train`"),
        ({"eagle_base_lora": True}, "lora={...}"),
        ({"eagle_base_lora_rnk": 64}, "unknown eagle3 head option 'eagle_base_lora_rnk'; "),
        ({"eagle_decoder_type": "kimik2"}, "eagle_decoder_type='kimik2' is not supported, only 'llama'"),
        ({"eagle_ttt_step": 3}, "eagle3 head option 'eagle_ttt_step'; "),
        ({"eagle_architecture_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm=True is not supported"),
        ({"eagle_architecture_config": {"head_dims": 3}}, "did you mean 'eagle_architecture_config.head_dim'"),
        ({"eagle_architecture_config": 3}, "eagle_architecture_config=3; expected options by name"),
        ({"use_aux_hidden_state": False, "draft_vocab_size": 4}, "eagle head option 'draft_vocab_size'"),
    ],
    ids=str,
)
def test_what_a_head_here_cannot_be_is_refused_by_its_name(config, message):
    with pytest.raises(ValueError) as caught:
        mtsp.convert(small(), [("eagle", config)])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["dflash", [("medusa", {}), ("eagle", {})], {"mode": "medusa"}, [("medusa", 3)], None])
def test_modes_that_are_none_are_refused(mode):
    with pytest.raises(ValueError, match="mode"):
        mtsp.convert(small(), mode)


def test_an_eagle3_head_is_exported_as_modelopt_writes_it(tmp_path, capsys):
    held = tiny_llama()
    mtsp.convert(held, EAGLE)
    mto.export_hf_checkpoint(held, export_dir=tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file() and "eagle_config" in Path(
        tmp_path / "out" / "config.json"
    ).read_text("utf8")
    mto.print_rank_0("done")
    assert capsys.readouterr().out.endswith("done\n")
    with pytest.raises(ValueError, match="has no head to save"):
        mto.save(small(), tmp_path / "x")
    with pytest.raises(ValueError, match="give its path, not a BufferedWriter"), open(tmp_path / "f", "wb") as file:
        mto.save(held, file)
