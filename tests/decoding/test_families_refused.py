"""What a base cannot be served with is refused, with the reason and what to take instead."""

import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM

from specheads import Target, UnsupportedModel, convert, generate
from tests.support.families import (
    FAMILIES,
    LATENT,
    VOCAB,
    build,
)


def beam():
    return build("BeamConfig", {"n_group": 1, "topk_group": 1})


def moshi():
    """Which AutoModelForCausalLM does not know."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 48}
    return transformers.MoshiForCausalLM(transformers.MoshiConfig(**sizes)).eval()


def test_a_base_whose_layers_need_their_model_has_no_mtp_head_and_is_told_what_to_take():
    for make, why, others in [
        (beam, "layer 3 of beam .*'full_attention'.*'eagle3'.*sliding_attention", {"mtp": {"layer_indices": (0,)}}),
        (moshi, "layer 3 of moshi does not work outside its model .*use_flexible_linear.*'eagle3'", {}),
    ]:
        base = make()
        with pytest.raises(UnsupportedModel, match=why) as refused:
            convert(base, "mtp")
        assert "\n" not in str(refused.value)
        given = {"input_ids": torch.arange(5, 25).unsqueeze(0), "max_new_tokens": 12, "do_sample": False}
        for kind, options in {"eagle3": {}, **others}.items():
            assert torch.equal(convert(base, kind, **options).generate(**given, draft=True), base.generate(**given))


def test_a_base_with_several_streams_of_hidden_states_takes_copies_and_no_head():
    base = build(
        "Gemma3nTextConfig",
        {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4,
         "activation_sparsity_pattern": [0.0] * 6, "tie_word_embeddings": False},
    )  # fmt: skip
    given = {"input_ids": torch.arange(5, 25).unsqueeze(0), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(generate(base, **given, draft="lookup"), base.generate(**given))
    for kind in ("medusa", "eagle3"):
        with pytest.raises(UnsupportedModel, match=r"4 streams of hidden states \(AltUp\), and a head reads one"):
            convert(base, kind)


def test_unsupported_families_are_refused_with_the_reason():
    for config, options, reason in [
        ("GPTNeoConfig", {"attention_types": [[["global", "local"], 2]]}, "masks by cache slot .*global, local"),
        ("GPTNeoConfig", {"attention_types": [[["global"], 4]]}, "masks by cache slot"),
        ("BloomConfig", {}, "takes no position_ids"),
        ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "takes no position_ids"),
        ("FalconConfig", {"alibi": True}, "alibi=True"),
        ("Mamba2Config", {"num_heads": 8, "state_size": 8, "n_groups": 1}, "takes no position_ids"),
        ("RwkvConfig", {}, "takes no position_ids"),
        ("xLSTMConfig", {"num_heads": 2}, "takes no position_ids"),
        ("MiniMaxConfig", {}, "not in transformers' own cache: MiniMax uses cache of its own"),
        ("RecurrentGemmaConfig", {}, "keeps its recurrent state outside the cache"),
        ("ZayaConfig", {"num_experts_per_tok": 1, "router_hidden_size": 8}, "ZayaCCA.* gives several tensors"),
        ("DeepseekV4Config", {}, "compressed_sparse_attention, heavily_compressed_attention; only full"),
        ("OpenAIGPTConfig", {}, "takes no cache"),
        ("BertConfig", {}, "attends to later tokens too"),
        ("DoryConfig", {"recurrent_kv_cache_mode": "last_loop"}, "'last_loop' reads the keys of its last loop"),
        ("DeepseekV32Config", LATENT, "(indexed|sparse)_attention; .*an indexer chooses which tokens"),
        ("GlmMoeDsaConfig", LATENT, "(indexed|sparse)_attention; .*an indexer chooses which tokens"),
    ]:
        base = build(config, options)
        with pytest.raises(UnsupportedModel, match=reason):
            convert(base, "medusa")
        with pytest.raises(UnsupportedModel, match=reason):
            Target(base)


def test_sliding_layers_without_a_window_are_refused():
    base = build("ModernBertDecoderConfig", {"global_attn_every_n_layers": 2})
    base.config.sliding_window = None
    with pytest.raises(UnsupportedModel, match="layers of sliding attention, and its config no sliding_window"):
        Target(base)


def test_encoder_decoders_are_refused():
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    base = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration is an encoder-decoder model"):
        convert(base, "medusa")


def test_other_attention_kernels_are_refused_with_the_fix():
    for attention in ["flash_attention_2", "flex_attention"]:
        base = build(*FAMILIES["Llama"])
        model = convert(base, "medusa")
        base.config._attn_implementation_internal = attention
        assert base.config._attn_implementation == attention
        with pytest.raises(UnsupportedModel, match=rf"not '{attention}'; call base\.set_attn_implementation\('sdpa'\)"):
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)


def test_scaling_by_cache_slot_is_refused_where_it_would_begin():
    model = convert(build("Llama4TextConfig", {"intermediate_size_mlp": 48, "floor_scale": 32}), "medusa")
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=28).shape == (1, 31)
    with pytest.raises(UnsupportedModel, match=r"by cache slot from 32 tokens on; prompt and new tokens come to 32"):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=29)


def test_eagle_is_refused_where_the_output_matrix_does_not_speak_alone():
    """These transform the last hidden state before the output matrix, which EAGLE-1 drafts through; other heads do
    not use it."""
    for config, options in [("ModernBertDecoderConfig", {}), ("RobertaConfig", {"is_decoder": True})]:
        base = build(config, options)
        with pytest.raises(
            UnsupportedModel, match=r"between the last hidden state and the logits.*'eagle3' or 'medusa'"
        ):
            convert(base, "eagle")
        assert convert(base, "eagle3").head.layers and convert(base, "medusa").head.layers
