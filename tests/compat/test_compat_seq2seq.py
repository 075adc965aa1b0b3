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


@pytest.mark.parametrize("length", [1, 6, 20])
def test_one_beam_writes_the_greedy_text_whatever_the_prompts_length(pair, length):
    base, _ = pair
    source = (SOURCE * 3)[:length]
    options = {"max_gen_len": 8, "eos_tokens_id": [], "pad_token_id": None}
    expected = compat.autoregressive_generate_encoder_decoder(source, base, **options)
    assert compat.beam_search_generate(source, base, num_beams=1, top_k=2, **options) == expected
    options["eos_tokens_id"] = [expected[0], expected[4]]  # of BART, the decoder's start token is an end token
    ended = compat.beam_search_generate(source, base, num_beams=1, top_k=2, **options)
    assert ended == expected[: 1 + next(i for i in range(1, 9) if expected[i] in options["eos_tokens_id"])]


def test_beams_find_a_text_at_least_as_likely_and_print_their_candidates(pair, capsys):
    base, _ = pair
    options = {"max_gen_len": 5, "eos_tokens_id": [], "pad_token_id": None, "num_beams": 3, "top_k": 2, "alpha": 0.0}

    @torch.no_grad()
    def score(ids):
        logits = base(torch.tensor([SOURCE]), decoder_input_ids=torch.tensor([ids[:-1]])).logits[0]
        return float(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).sum())

    found = compat.beam_search_generate(SOURCE, base, debug=True, **options)
    printed = capsys.readouterr().out
    assert score(found) >= score(compat.beam_search_generate(SOURCE, base, **options | {"num_beams": 1})) - 1e-5
    steps = printed.split("candidates for token ")[1:]
    assert [step.count("\n") - 1 for step in steps] == [3, 6, 6, 6, 6]  # the start token has as many as beams
    best = steps[-1].splitlines()[1].split(". ")[1].split(" ")[0]
    assert float(best) == pytest.approx(score(found), abs=2e-3)


def test_patched_generate_drafts_with_an_encoder_decoder(pair):
    base, small = pair
    expected = greedy(base)
    with specheads.patch(base):
        out = greedy(base, assistant_model=small, num_assistant_tokens=3, return_dict_in_generate=True)
        assert torch.equal(greedy(base), expected)
    assert torch.equal(out.sequences, expected) and out.statistics()["accepted_length"] > 1
