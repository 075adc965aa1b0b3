"""Keys of configs of published heads, beyond the sizes that foreign.py and its kin write, with published values scaled
to the toy base. From SpecForge, AngelSlim, EAGLE, speculators 0.3 to 0.9, ModelOpt, z-lab, FasterDecoding and vLLM."""

from __future__ import annotations

from transformers import PretrainedConfig

# Everything that transformers writes into the config of any model. speculators nests such a whole config.
TRANSFORMERS = {
    **{name: value for name, value in PretrainedConfig().to_dict().items() if name != "model_type"},
    "return_dict": True, "output_hidden_states": False, "torchscript": False, "torch_dtype": "bfloat16",
    "use_bfloat16": False, "tf_legacy_loss": False, "pruned_heads": {}, "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "num_return_sequences": 1,
    "encoder_no_repeat_ngram_size": 0, "output_scores": False, "return_dict_in_generate": False,
    "remove_invalid_values": False, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0},
    "_name_or_path": "org/base", "_attn_implementation_autoset": True, "transformers_version": "4.57.1",
}  # fmt: skip
COMMON = {
    "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "pretraining_tp": 1, "max_window_layers": 36, "sliding_window": 131072,
    "use_sliding_window": False, "rope_scaling": None,
}  # fmt: skip
EAGLE3 = {
    **COMMON, "target_model_type": "qwen3", "modal_type": "VLM", "image_token_id": 70, "video_token_id": 71,
    "vision_start_token_id": 72, "vision_end_token_id": 73, "vision_token_id": 74, "use_mrope": False,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1, "quantization_config": None,
    "norm_before_residual": False, "norm_output": False, "qkv_bias": False, "num_aux_hidden_states": 3,
}  # fmt: skip
HUNYUAN = {
    "add_classification_head": False, "attention_head_dim": 128, "cla_share_factor": 2, "class_num": 0,
    "dense_list": [32, 0], "eod_token_id": 5, "im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12,
    "norm_type": "rms", "org_vocab_size": 97, "pad_id": 3, "pool_type": "last", "text_end_id": 7, "text_start_id": 6,
    "use_cla": False, "use_rotary_pos_emb": True, "image_start_token_id": 8, "image_end_token_id": 9,
    "image_newline_token_id": 10, "sep_token_id": 4,
}  # fmt: skip
SPECULATORS = {
    "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "base_model_ep_plan": None, "dtype": "bfloat16",
    "has_no_defaults_at_init": False, "transformers_version": "4.57.1", "target_hidden_size": None,
}  # fmt: skip
PARALLEL = {**COMMON, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dtype": "bfloat16"}
WITH_THE_BASES_CONFIG = {
    **COMMON, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 32, "vocab_size": 97,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 32768,
}  # fmt: skip
