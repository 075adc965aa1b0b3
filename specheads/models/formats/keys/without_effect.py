"""Keys of foreign configs that do not change what a head drafts, with the reason, and keys with one supported value.

They are what published configs hold beyond what a format reads: those of SpecForge, AngelSlim, EAGLE, speculators,
ModelOpt, z-lab and DeepSpec, and everything that transformers 4 and 5 write for any model. A key that is neither read
nor listed here is refused (config_table.py).
"""

from __future__ import annotations

from typing import Any

WHY: dict[str, tuple[str, ...]] = {
    "says what the format is, by which it was recognised": ("speculators_model_type",),
    "names what wrote the file, what it was made for, and where; tensors have their own dtype": (
        "_name_or_path", "name_or_path", "base_model_name_or_path", "_commit_hash", "transformers_version", "version",
        "auto_map", "auto_class", "_auto_class", "tokenizer_class", "speculators_version", "speculators_config",
        "torch_dtype", "dtype", "finetuning_task", "task_specific_params", "problem_type", "prefix",
        "custom_pipelines", "target_model_type", "modal_type",
    ),
    "the base's own tokens count": (
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id",
        "decoder_start_token_id", "eod_token_id", "pad_id", "image_token_id", "image_token_index", "video_token_id",
        "vision_token_id", "vision_start_token_id", "vision_end_token_id", "audio_token_id", "audio_token_index",
        "image_start_token_id", "image_end_token_id", "image_newline_token_id", "im_start_id", "im_end_id",
        "im_newline_id", "text_start_id", "text_end_id", "mask_init_id",
    ),
    "for training only": (
        "initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "classifier_dropout",
        "gradient_checkpointing", "num_anchors", "loss_decay_gamma", "confidence_head_alpha", "output_router_logits",
        "router_aux_loss_coef", "mtp_loss_scaling_factor",
    ),
    "how to compute the same thing": (
        "use_cache", "pretraining_tp", "attention_backend", "_attn_implementation", "attn_implementation",
        "_attn_implementation_autoset", "chunk_size_feed_forward", "base_model_tp_plan", "base_model_pp_plan",
        "base_model_ep_plan", "use_bfloat16", "torchscript", "tf_legacy_loss", "experts_implementation",
        "_experts_implementation",
    ),
    "limits of the base, whose own count; heads here have none": (
        "max_position_embeddings", "original_max_position_embeddings", "max_sequence_length", "num_target_layers",
        "org_vocab_size",
    ),
    "layer_types says which layers have windows": ("max_window_layers",),
    "without windows it has no meaning; with them it is read": ("sliding_window_non_causal",),
    "a head with an lm_head.weight drafts with that, and one without is checked": ("tie_word_embeddings",),
    "the tensors show it": (
        "attention_head_dim", "attention_mode", "use_qk_norm", "dense_list", "cla_share_factor", "eh_proj_bias",
        "parallel_draft_heads_num_layers", "num_experts", "num_local_experts", "num_experts_per_tok",
        "decoder_sparse_step", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
        "mlp_only_layers",
    ),
    "of other tasks than drafting": (
        "add_classification_head", "class_num", "pool_type", "id2label", "label2id", "return_dict",
        "output_hidden_states", "output_attentions", "pruned_heads", "is_decoder", "is_encoder_decoder",
        "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder", "is_composition", "sub_configs",
        "attribute_map", "keys_to_ignore_at_inference", "base_config_key", "has_no_defaults_at_init",
    ),
    "a call of generate() gives its own": (
        "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
        "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
        "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
        "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    ),
    "the server's command says how many tokens and paths to draft": (
        "max_paths", "topk", "max_seq_len", "num_lookahead_tokens",
    ),
}  # fmt: skip
WITHOUT_EFFECT = {name: why for why, names in WHY.items() for name in names}

# Where a format does not read one of these, this is the value of heads here. Any other is refused.
ONLY: dict[str, Any] = {
    # what is added to attention, scaled or left out
    "use_sliding_window": False, "use_swa": False, "attention_sink_bias": False, "add_swa_attention_sink_bias": False,
    "is_neox_style": True, "use_mrope": False, "use_rotary_pos_emb": True, "use_cla": False, "factor": 1.0,
    "input_embedding_scale": 1.0, "output_multiplier": 1.0, "logit_scale": 1.0, "norm_type": "rms", "bias": False,
    "attention_bias": False, "mlp_bias": False, "qkv_bias": False,
    # EAGLE-3's and ModelOpt's variants
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "eh_proj_before_attn": False, "eagle_decoder_type": "llama", "parallel_draft_step": 1,
    "parallel_drafting": False, "embed_requires_grad": False, "use_aux_norm": False, "norm_before_residual": False,
    "norm_before_fc": False, "fc_norm": False, "norm_output": False, "return_hidden_post_norm": False,
    "add_para_norm": False,
    # parallel heads' and MTP modules'
    "shift_label": False, "sample_from_anchor": False, "projector_type": "dspark",
    "mtp_use_dedicated_embeddings": False, "mtp_hidden_states_first": False,
}  # fmt: skip

_QUANTISED = "its weights are quantised, and heads here are not: take a copy in bfloat16"
REASONS = {"quantization_config": _QUANTISED, "compression_config": _QUANTISED}
