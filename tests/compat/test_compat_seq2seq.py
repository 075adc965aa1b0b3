"""romsto's functions and patch() on encoder-decoders: their own greedy text, the start token in front."""

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import specheads
from specheads import compat
from tests.support.tiny_models import near

SOURCE, NEW = [5, 6, 7, 8, 9, 41, 3], 14
SHARED = {"vocab_size": 97, "d_model": 32, "pad_token_id": 0, "eos_token_id": 1}


def t5():
    config = T5Config(**SHARED, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    base = T5ForConditionalGeneration(config)
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.clone())  # tied, it would repeat its last token
    return base


def bart():
    config = BartConfig(
        **SHARED, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, decoder_start_token_id=2,
        forced_eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[(t5, 0.4), (bart, 0.2)], ids=["t5", "bart"])
def pair(request):
    """A target whose greedy text varies, and a draft model that is often right."""
    make, spread = request.param
    base, coin = make().eval(), torch.Generator().manual_seed(1)
    for parameter in base.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=spread, generator=coin)
    return base, near(base, 0.01)


def greedy(base, **options):
    return base.generate(torch.tensor([SOURCE]), max_new_tokens=NEW, do_sample=False, **options)


def test_greedy_text_is_the_targets_own(pair):
    base, small = pair
    expected = greedy(base, eos_token_id=[], forced_eos_token_id=None)[0].tolist()
    assert len(set(expected)) > 4, "a text that repeats itself shows little"
    options = {"max_gen_len": NEW, "eos_tokens_id": []}
    assert compat.autoregressive_generate_encoder_decoder(SOURCE, base, **options) == expected
    ids, alpha = compat.speculative_generate_encoder_decoder(SOURCE, small, base, gamma=3, **options)
    assert ids == expected and 0 < alpha <= 1
    ids, _ = compat.ngram_assisted_speculative_generate(SOURCE, compat.NGramStorage(3, 97), base, **options)
    assert ids == expected
    end = expected[6]
    ids, _ = compat.speculative_generate_encoder_decoder(
        SOURCE, small, base, gamma=3, max_gen_len=NEW, eos_tokens_id=[96, end]
    )
    assert ids == expected[: expected.index(end, 1) + 1]


def test_the_text_begins_with_the_decoders_start_token_and_ends_where_its_positions_do(pair):
    base, small = pair
    longest = getattr(base.config, "max_position_embeddings", None)
    options = {"max_gen_len": 70, "end_tokens_id": []}
    ids, alpha = compat.speculative_generate_encoder_decoder(SOURCE, small, base, None, 4, None, **options)
    assert ids[0] == base.config.decoder_start_token_id and len(ids) == min(71, longest or 71) and 0 < alpha <= 1
    assert compat.autoregressive_generate_encoder_decoder(SOURCE, base, **options) == ids
    if longest:
        with pytest.raises(ValueError, match=f"^the prompt takes {longest + 1} tokens, and the model has positions"):
            compat.autoregressive_generate_encoder_decoder([5] * (longest + 1), base)


def test_debug_prints_what_an_encoder_decoder_writes(pair, capsys):
    base, small = pair
    ids, _ = compat.speculative_generate_encoder_decoder(SOURCE, small, base, max_gen_len=6, end_tokens_id=[],
                                                         debug=True)  # fmt: skip
    out = capsys.readouterr().out
    assert out.startswith(f"token 0: {ids[1]}\n") and out.rstrip().endswith(f" {ids[-1]}")


def test_patched_generate_drafts_with_an_encoder_decoder(pair):
    base, small = pair
    expected = greedy(base)
    with specheads.patch(base):
        out = greedy(base, assistant_model=small, num_assistant_tokens=3, return_dict_in_generate=True)
        assert torch.equal(greedy(base), expected)
    assert torch.equal(out.sequences, expected) and out.statistics()["accepted_length"] > 1
