"""Seq2SeqTarget: a chain's logits are those of a fresh forward, whatever the rows' lengths; nothing is run twice."""

import itertools

import pytest
import torch
from torch import nn
from transformers import (
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import specheads
from specheads import DraftModel, DraftTree, MaxGram, PromptLookup, UnsupportedModel, chain, convert
from specheads.decoding.verify import seq2seq
from specheads.decoding.verify.seq2seq import Seq2SeqTarget, Source, group_passes
from tests.support.seq2seq_models import BATCHES, MODELS, SOURCES, Known, V, tiny_bart, tiny_t5

BART_SIZES = {
    "vocab_size": V, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64,
    "init_std": 0.3, "pad_token_id": 0, "decoder_start_token_id": 2,
}  # fmt: skip
T5_SIZES = {
    "vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
}  # fmt: skip
FAMILIES = {
    "t5": tiny_t5,
    "bart": tiny_bart,
    "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**T5_SIZES)),
    "umt5": lambda: UMT5ForConditionalGeneration(UMT5Config(**T5_SIZES)),
    "mbart": lambda: MBartForConditionalGeneration(MBartConfig(**BART_SIZES)),
    "pegasus": lambda: PegasusForConditionalGeneration(PegasusConfig(**BART_SIZES)),
    "marian": lambda: MarianMTModel(MarianConfig(**BART_SIZES)),
    "blenderbot": lambda: BlenderbotForConditionalGeneration(BlenderbotConfig(**BART_SIZES)),
}


def chains(tokens):
    depth = tokens.shape[1] - 1
    return DraftTree(tokens, torch.arange(-1, depth).expand_as(tokens), depth)


# Without an overhead each length gets a pass of its own; with a large one all rows share one.
@pytest.mark.parametrize("overhead", [0, 10**6], ids=["passes by length", "one pass"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_chain_logits_equal_those_of_a_fresh_forward_at_rows_of_any_length(family, overhead, monkeypatch):
    monkeypatch.setattr(seq2seq, "PASS_ON_CPU", overhead)
    torch.manual_seed(1)
    base = FAMILIES[family]().double().eval()
    target = Seq2SeqTarget(base, Source.encode(base, SOURCES), scratch=4)
    texts = [[2, 30], [2, 31], [2, 32]]

    def fresh(row, ids):
        return base(input_ids=torch.tensor([SOURCES[row]]), decoder_input_ids=torch.tensor([ids])).logits[0]

    if not torch.equal(fresh(0, [2, 30])[0], fresh(0, [2, 31])[0]):
        pytest.skip("the decoder of this transformers sees later tokens in a pass without a cache")
    out = target.prefill(torch.tensor(texts), torch.tensor([2, 2, 2]), room=30)
    for row, text in enumerate(texts):
        assert torch.allclose(out.logits[row, 0], fresh(row, text)[-1], atol=1e-9)
    for step in range(5):
        tokens = torch.randint(3, V, (3, 4))
        tokens[:, 2] = 0  # a drafted padding id is an id like any other
        logits = target.verify(chains(tokens)).logits
        for row, text in enumerate(texts):
            assert torch.allclose(logits[row], fresh(row, text + tokens[row].tolist())[-4:], atol=1e-9)
        kept = [4, 1 + step % 4, 1 + (step + 2) % 3]
        target.commit(torch.arange(4).expand(3, -1), torch.tensor(kept))
        for text, row, n in zip(texts, tokens.tolist(), kept, strict=True):
            text += row[:n]
    assert len({len(text) for text in texts}) == 3


@torch.no_grad()
def test_a_chain_grown_token_by_token_gives_the_same_logits():
    base = tiny_bart().double()
    tokens = torch.tensor([[30, 31, 32], [40, 41, 42], [50, 51, 52]])
    whole, grown = (Seq2SeqTarget(base, Source.encode(base, SOURCES), scratch=3) for _ in range(2))
    for target in (whole, grown):
        target.prefill(torch.tensor([[2, 9], [2, 9], [2, 9]]), torch.tensor([2, 1, 2]), room=9)
    expected, levels = whole.verify(chains(tokens)).logits, grown.levels()
    for depth in range(3):
        logits = grown.forward_level(levels, tokens[:, depth : depth + 1], torch.zeros(3, 1, dtype=torch.long)).logits
        assert torch.allclose(logits[:, 0], expected[:, depth], atol=1e-9)


@torch.no_grad()
def test_a_cache_that_grows_keeps_what_it_holds(monkeypatch):
    monkeypatch.setattr("specheads.decoding.verify.slot_cache.RESERVE", 1)
    base = tiny_t5().double()
    target, text = Seq2SeqTarget(base, Source.encode(base, SOURCES[:1]), scratch=3), [2]
    target.prefill(torch.tensor([text]), torch.tensor([1]), room=60)
    for _ in range(8):
        tokens = torch.randint(3, V, (1, 3))
        logits = target.verify(chains(tokens)).logits
        target.commit(torch.arange(3).expand(1, -1), torch.tensor([3]))
        text += tokens[0].tolist()
    fresh = base(input_ids=torch.tensor(SOURCES[:1]), decoder_input_ids=torch.tensor([text])).logits
    assert torch.allclose(logits, fresh[:, -3:], atol=1e-9)


def test_rows_share_passes_as_is_cheapest():
    """Against every way of splitting the rows."""

    def cost(split, start, num, overhead):
        groups = [[start[i] for i in group] for group in split]
        return sum(overhead + len(group) * (max(group) - min(group) + num) for group in groups)

    def splits(rows):
        if not rows:
            yield []
            return
        for size in range(len(rows)):
            for others in itertools.combinations(rows[1:], size):
                rest = [row for row in rows[1:] if row not in others]
                for split in splits(rest):
                    yield [[rows[0], *others], *split]

    for start, num, overhead in itertools.product(
        ([5, 5, 5], [9, 1, 2, 30], [3, 40, 4, 41, 5]), (1, 6), (0, 5, 24, 500)
    ):
        found = group_passes(start, num, overhead)
        assert sorted(itertools.chain(*found)) == list(range(len(start)))
        best = min(cost(split, start, num, overhead) for split in splits(list(range(len(start)))))
        assert cost(found, start, num, overhead) == best


class Counting:
    """What went through a model: calls of its encoder, tokens its decoder was fed, by call, and how often each layer
    made the keys of its cross-attention."""

    def __init__(self, model):
        self.encoder_calls, self.fed, self.cross = 0, [], []
        model.get_encoder().register_forward_hook(self._encoded)
        model.get_decoder().register_forward_hook(self._decoded, with_kwargs=True)
        for name, module in model.get_decoder().named_modules():
            if isinstance(module, nn.Linear) and name.endswith(("EncDecAttention.k", "encoder_attn.k_proj")):
                module.register_forward_hook(lambda *args, name=name: self.cross.append(name))

    def _encoded(self, *args):
        self.encoder_calls += 1

    def _decoded(self, module, args, kwargs, out):
        self.fed.append(tuple(kwargs["input_ids"].shape))


def test_the_encoder_runs_once_and_no_text_is_fed_twice():
    for make, batch in itertools.product(MODELS.values(), BATCHES):
        base, inputs = make(), BATCHES[batch]
        expected = base.generate(**inputs, max_new_tokens=24, min_new_tokens=24)
        count = Counting(base)
        out = specheads.generate(
            base, **inputs, draft=Known(expected), max_new_tokens=24, min_new_tokens=24, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, expected)
        assert count.encoder_calls == 1
        assert len(count.cross) == len(set(count.cross)) == 2
        if batch == "one":  # one pass a step, over the root and the draft: the length limit alone may cut it
            assert len(count.fed) == len(out.steps) == 1 + out.statistics()["steps"]
            assert count.fed[0] == (1, 1) and set(count.fed[1:-1]) == {(1, 5)} and count.fed[-1][1] <= 5


def test_a_draft_model_encodes_once_and_is_fed_each_token_once():
    base = tiny_t5()
    small = tiny_t5()
    inputs, expected = BATCHES["one"], base.generate(**BATCHES["one"], max_new_tokens=24)
    count = Counting(small)
    out = specheads.generate(
        base, **inputs, draft=DraftModel(small), tree=chain(4), max_new_tokens=24, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    assert out.statistics()["accepted_length"] > 4  # it is the same model, so all drafts hold
    assert count.encoder_calls == 1 and len(count.cross) == 2
    # The prompt and first token at once, then per step the last draft and the bonus, and all drafts but the last one.
    assert count.fed[0] == (1, 2) and sum(width for _, width in count.fed) <= expected.shape[1] + 4


def test_rows_that_have_ended_are_fed_no_more():
    base, small, inputs = tiny_t5(), tiny_t5(), BATCHES["ragged"]
    text = base.generate(**inputs, max_new_tokens=30)
    eos = next(token for token in text[1].tolist()[3:] if token not in {*text[0].tolist(), *text[2].tolist()})
    expected = base.generate(**inputs, max_new_tokens=30, eos_token_id=eos)
    counts = [Counting(base), Counting(small)]
    out = specheads.generate(
        base, **inputs, draft=DraftModel(small), tree=chain(3), max_new_tokens=30, eos_token_id=eos,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, expected)
    running = [sum(map(bool, step.tokens)) for step in out.steps]
    assert set(running) == {3, 2}
    target, draft = (sum(rows for rows, _ in count.fed) for count in counts)
    assert target == sum(running)
    # Text once a step, with the prompt at first, and all drafts but the last; of an ended row its last text is read.
    assert draft <= 3 * (sum(running[1:]) + 1)


# --- What is refused ---


def prophetnet():
    sizes = {"vocab_size": V, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_encoder_layers": 1,
             "num_decoder_layers": 1, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}  # fmt: skip
    return ProphetNetForConditionalGeneration(ProphetNetConfig(**sizes))


def whisper():
    sizes = {name: size for name, size in BART_SIZES.items() if name != "max_position_embeddings"}
    special = {"bos_token_id": 1, "eos_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": []}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **special, max_source_positions=8))


def test_decoders_that_cannot_verify_a_chain_are_refused_with_the_reason():
    for make, message in [
        (prophetnet, "takes one token at a time"),
        (
            lambda: M2M100ForConditionalGeneration(M2M100Config(**BART_SIZES)),
            "counts positions by which ids are padding",
        ),
        (
            lambda: SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**T5_SIZES, num_experts=2)),
            "experts of limited capacity",
        ),
        (whisper, "reads input_features"),
    ]:
        base = make()
        with pytest.raises(UnsupportedModel, match=message):
            Seq2SeqTarget(base, Source(torch.zeros(1, 1, 32), None, [[5]]))
        with pytest.raises(UnsupportedModel, match=message):
            DraftModel(base)


class Branching:
    """A chain in the first row, two siblings in the second."""

    layers = ()

    def default_plan(self, device, do_sample):
        return chain(2)

    def propose(self, context, sampler, plan):
        tokens = torch.cat([context.root.unsqueeze(1), torch.tensor([[5, 6]]).expand(len(context.root), -1)], 1)
        return DraftTree(tokens, torch.tensor([[-1, 0, 1]] + [[-1, 0, 0]] * (len(tokens) - 1)), 2)


def test_drafts_that_branch_are_refused():
    for options, message in [
        ({"draft": MaxGram(), "tree": specheads.comb(3)}, "chains only: T5.* takes no position_ids.*give tree=chain"),
        ({"draft": MaxGram(), "tree": specheads.DynamicTree()}, "chains only"),
        ({"draft": PromptLookup(width=2)}, "chains only"),
        ({"draft": Branching()}, "chains only"),
    ]:
        with pytest.raises(ValueError, match=message):
            specheads.generate(tiny_t5(), **BATCHES["ragged"], max_new_tokens=5, **options)


def test_models_of_two_kinds_do_not_draft_for_one_another(base):
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot draft for T5ForConditionalGeneration"):
        specheads.generate(tiny_t5(), **BATCHES["one"], max_new_tokens=5, draft=DraftModel(base))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration cannot draft for LlamaForCausalLM"):
        specheads.generate(base, **BATCHES["one"], max_new_tokens=5, draft=DraftModel(tiny_t5()))


def test_a_draft_model_says_what_it_misses(monkeypatch):
    base, inputs = tiny_t5(), BATCHES["one"]
    encoded = base.get_encoder()(**inputs)
    with pytest.raises(ValueError, match="its ids are not known; give input_ids"):
        specheads.generate(base, encoder_outputs=encoded, max_new_tokens=5, draft=DraftModel(tiny_t5()))
    with pytest.raises(ValueError, match=r"50.*97"):
        specheads.generate(base, **inputs, max_new_tokens=5, draft=DraftModel(tiny_t5(vocab_size=50)))
    with pytest.raises(ValueError, match="positions for 4 tokens"):
        specheads.generate(base, **inputs, max_new_tokens=5, draft=DraftModel(tiny_bart(max_position_embeddings=4)))


def test_heads_stay_with_decoder_only_models(model):
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration is an encoder-decoder model"):
        convert(tiny_t5(), "medusa")
    with pytest.raises(UnsupportedModel, match="draft heads are for decoder-only ones; draft with"):
        specheads.generate(tiny_t5(), **BATCHES["one"], max_new_tokens=5, draft=model.head, tree=chain(2))
