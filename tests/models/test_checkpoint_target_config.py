"""The target's config in an MTP head's file, which a stranger wrote: it chooses no code, and has no absurd number."""

from __future__ import annotations

import json
import math

import pytest
from transformers import BambaConfig, GptOssConfig, LlamaConfig, Qwen3_5Config

from specheads import CheckpointError, SpecModel, load_head
from specheads.heads.mtp.target_layers import check_table, config_table
from tests.support.heads_on_disk import edit_config, kept_files, trained

pytestmark = pytest.mark.usefixtures("offline")

CODE = {
    "attn_implementation": "owner/kernel", "_attn_implementation": "owner/kernel",
    "_attn_implementation_internal": "owner/kernel", "experts_implementation": "owner/kernel",
    "_experts_implementation_internal": "owner/kernel", "auto_map": {"AutoModel": "owner/code--modeling.Model"},
    "quantization_config": {"quant_method": "fp8"}, "use_kernels": True,
}  # fmt: skip
ABSURD = {
    "rms_norm_eps": math.nan, "layer_norm_epsilon": -1.0, "num_hidden_layers": 4096, "num_layers": 10**400,
    "max_position_embeddings": 2**31, "n_positions": 2.0**40, "hidden_size": 2**40, "num_experts": 10**6,
    "rope_theta": -1.0, "initializer_range": math.inf, "routed_scaling_factor": {"__float__": "NaN"},
    "attention_bias_scale": [1.0, -math.inf], "sliding_window": 2**40,
}  # fmt: skip


def with_entries(folder, **entries):
    head = json.loads((folder / "config.json").read_text("utf8"))["head"]
    edit_config(folder, head={**head, "target_config": {**head["target_config"], **entries}})


def test_the_target_config_of_a_file_is_refused_beside_ones_own_base(named, tmp_path):
    trained(named, "mtp").save_pretrained(tmp_path)
    load_head(named, tmp_path)
    for name, value in [*CODE.items(), *ABSURD.items()]:
        expected = "chooses code" if name in CODE else "must be a number from"
        for entries in ({name: value}, {"text_config": [{name: value}]}):
            with kept_files(tmp_path):
                with_entries(tmp_path, **entries)
                with pytest.raises(CheckpointError, match=f"target_config: {name}=.*{expected}") as error:
                    SpecModel.from_pretrained(tmp_path, base=named)
            assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_what_real_targets_have_is_taken():
    for config in (LlamaConfig(), BambaConfig(), GptOssConfig(), Qwen3_5Config().get_text_config()):
        config._attn_implementation = "eager"
        check_table(json.loads(json.dumps(config_table(config))))
    check_table({"model_type": "bamba", "time_step_limit": [0.0, {"__float__": "Infinity"}], "max_window_layers": 28})


def test_entries_of_a_base_that_choose_code_are_left_out_of_its_heads():
    config = LlamaConfig(quantization_config={"quant_method": "fp8"}, custom_implementation="fast")
    assert {*config_table(config)}.isdisjoint({"quantization_config", "custom_implementation"})
