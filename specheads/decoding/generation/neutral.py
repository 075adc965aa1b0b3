"""Options of generate() under which the text depends on the model's logits alone."""

from __future__ import annotations

from typing import Any

# Neutral values for everything a model's own generation config may set, such as a repetition penalty that came with its
# checkpoint, and for what generate() with drafts would refuse.
NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "min_length": 0, "min_new_tokens": None, "max_time": None,
    "guidance_scale": None, "watermarking_config": None, "penalty_alpha": None, "dola_layers": None, "use_mtp": False,
    "force_words_ids": None, "constraints": None, "token_healing": False, "output_attentions": False,
    "output_hidden_states": False, "num_return_sequences": 1, "stop_strings": (),
}  # fmt: skip
