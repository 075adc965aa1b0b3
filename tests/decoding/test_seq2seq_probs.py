"""Sampled text of encoder-decoders has the target's distribution: all outcomes enumerated, with a real T5 and BART."""

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from specheads import Block, DraftModel, Exact, SampledTree, chain, decode
from specheads.decoding.verify.seq2seq import Seq2SeqTarget, Source
from tests.reference.enumeration import Table, TableDrafter, distance, probs_of
from tests.support.seq2seq_models import restless

START, FIRST = 0, [1, 0]


def tiny(kind, vocab_size, seed):
    torch.manual_seed(seed)
    ids = {"vocab_size": vocab_size, "decoder_start_token_id": START, "pad_token_id": 0, "tie_word_embeddings": False}
    if kind == "t5":
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        near = {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 4}
        model = T5ForConditionalGeneration(T5Config(**ids, **sizes, **near))
        return restless(model, relative_attention_bias=1.5, lm_head=0.6).double()
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder")
             for name, n in (("layers", 1), ("ffn_dim", 8), ("attention_heads", 2))}  # fmt: skip
    model = BartForConditionalGeneration(BartConfig(**ids, **sizes, d_model=8, max_position_embeddings=16))
    return restless(model, embed=1.0, shared=1.0, q_proj=1.0, k_proj=1.0, lm_head=0.6).double()


@torch.no_grad()
def true_probs(base, sources, length):
    """The rows' joint distribution after a certain first token, each by forwards of the row alone, without a cache."""
    joint = {(): 1.0}
    for row, source in enumerate(sources):
        probs = {(FIRST[row],): 1.0}
        for _ in range(length - 1):
            longer = {}
            for tokens, chance in probs.items():
                ids = torch.tensor([[START, *tokens]])
                logits = base(input_ids=torch.tensor([source]), decoder_input_ids=ids).logits[0, -1]
                longer |= {(*tokens, token): chance * p for token, p in enumerate(logits.softmax(-1).tolist())}
            probs = longer
        joint = {(*rows, row): a * b for rows, a in joint.items() for row, b in probs.items()}
    return joint


def output_probs(base, drafter, plan, sources, length, rule):
    source, batch, seen = Source.encode(base, sources), len(sources), set()

    def stop(row, ids, count):
        over = len(ids) - 1 - length
        return count - over if over >= 0 else -1

    def run(sampler):
        drawn = sampler.draw
        sampler.draw = lambda p, numbers=None: torch.tensor(FIRST[:batch])  # the prefill's token, for fewer outcomes
        target, rows = Seq2SeqTarget(base, source, scratch=plan.num_nodes), [() for _ in sources]
        made = decode(
            target, drafter, torch.full((batch, 1), START), torch.ones(batch, dtype=torch.long), plan=plan,
            sampler=sampler, accept=rule, stop=stop, max_new_tokens=length + plan.depth,
        )  # fmt: skip
        for step in made:
            sampler.draw = drawn
            rows = [(*row, *gained) for row, gained in zip(rows, step.tokens, strict=True)]
            seen.add(tuple(step.accepted))
        return tuple(rows)

    probs = probs_of(run)
    # All lengths were accepted, and rows went apart.
    assert {n for accepted in seen for n in accepted} == set(range(min(plan.depth, length - 1) + 1))
    assert batch == 1 or any(len(set(accepted)) > 1 for accepted in seen)
    return probs


LONG, RAGGED = ([1, 0, 1, 1],), ([1, 0, 1, 1], [1])
CASES = {
    "t5, point mass, batch": ("t5", 2, chain(1), RAGGED, 3, Exact()),
    "bart, point mass, batch": ("bart", 2, chain(1), RAGGED, 3, Exact()),
    "t5, sampled chain, batch": ("t5", 2, SampledTree((1,)), RAGGED, 2, Exact()),
    "t5, sampled chain": ("t5", 3, SampledTree((1,)), LONG, 3, Exact()),
    "t5, sampled chain of two": ("t5", 3, SampledTree((1, 1)), LONG, 2, Exact()),
    "bart, block": ("bart", 2, SampledTree((1, 1)), LONG, 4, Block()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_drafts_leave_the_joint_distribution_as_it_is(case):
    kind, vocab_size, plan, sources, length, rule = CASES[case]
    base, drafter = tiny(kind, vocab_size, 0), TableDrafter(Table(vocab_size, 5))
    probs = output_probs(base, drafter, plan, sources, length, rule)
    assert distance(probs, true_probs(base, sources, length)) < 1e-12


def test_a_smaller_encoder_decoder_leaves_it_so_too():
    for plan, length in [(chain(1), 3), (SampledTree((1,)), 2)]:
        base, small = tiny("t5", 2, 0), tiny("t5", 2, 1)
        expected = true_probs(base, RAGGED, length)
        assert distance(true_probs(small, RAGGED, length), expected) > 0.01
        assert distance(output_probs(base, DraftModel(small), plan, RAGGED, length, Exact()), expected) < 1e-12


def test_the_source_and_the_order_of_text_both_matter_to_that_distribution():
    for kind in ("t5", "bart"):
        base = tiny(kind, 2, 0)
        probs = true_probs(base, LONG, 3)
        assert distance(probs, true_probs(base, ([1],), 3)) > 0.001
        assert distance(probs, {((first, b, a),): p for ((first, a, b),), p in probs.items()}) > 0.001
