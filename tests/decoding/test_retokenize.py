"""Drafting between two vocabularies: the text is the target's own, and the draft model's tokens are accepted."""

import copy
import string

import pytest
import torch
from tokenizers import decoders, normalizers, pre_tokenizers, processors

import specheads
from specheads import AdaptiveChain, DraftModel, SampledTree, StaticTree, chain
from specheads.decoding.drafters import retokenize
from specheads.decoding.drafters.retokenize import RetokenizedText, encode_after
from tests.decoding.test_cached_model import Checked
from tests.support.prompts import padded
from tests.support.tiny_models import tiny_llama
from tests.support.two_vocabularies import OWN, SPACE, TARGET, TEXT, toy_tokenizer


def taught(tokenizer, seed):
    """A model trained to write TEXT, and to end where it ends."""
    base = tiny_llama(
        vocab_size=len(tokenizer), num_hidden_layers=2, initializer_range=0.1, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer(TEXT * 2)["input_ids"] + [tokenizer.eos_token_id]])
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        base(ids, labels=ids).loss.backward()
        optimizer.step()
    return base


@pytest.fixture(scope="module")
def pair():
    """A target, and a draft model of another vocabulary that compares its logits with an uncached forward."""
    return taught(TARGET, 0), Checked(taught(OWN, 1), tokenizer=OWN, target_tokenizer=TARGET)


@pytest.mark.parametrize("tree", [None, chain(1), chain(8), AdaptiveChain(max_depth=12, confidence=0.5)], ids=repr)
@pytest.mark.sampled(4)
def test_a_draft_through_text_matches_greedy(pair, tree):
    base, drafter = pair
    prompts = [TARGET(text)["input_ids"] for text in ("the c", "rat sat o", "zebra", "t", "in a café")]
    prompts[-1].pop()  # in the middle of a character
    for rows in (prompts[:1], prompts[1:], [[1]]):
        inputs, options = padded(rows), {"do_sample": False, "max_new_tokens": 40}
        out = specheads.generate(base, **inputs, **options, draft=drafter, tree=tree, return_dict_in_generate=True)
        assert torch.equal(out.sequences, base.generate(**inputs, **options))
        if rows == prompts[:1] and tree != chain(1):
            assert out.statistics()["accepted_length"] > 2, "hardly a draft was accepted, so this shows little"


def test_the_end_of_the_text_is_drafted_too(pair):
    base, drafter = pair
    inputs, options = padded([TARGET(TEXT * 2)["input_ids"][:-6]]), {"do_sample": False, "max_new_tokens": 20}
    out = specheads.generate(base, **inputs, **options, draft=drafter, tree=chain(12), return_dict_in_generate=True)
    assert torch.equal(out.sequences, base.generate(**inputs, **options))
    assert out.sequences[0, -1] == TARGET.eos_token_id
    assert sum(step.accepted[0] for step in out.steps) == out.sequences.shape[1] - inputs["input_ids"].shape[1] - 1


def test_sampled_text_is_that_of_plain_decoding(pair):
    """A chain of likeliest tokens is a point mass, so a seed gives plain decoding's text at one token a step."""
    base, drafter = pair
    options = {"do_sample": True, "temperature": 0.01, "top_k": 0, "max_new_tokens": 20, "seed": 0}
    out = specheads.generate(base, **padded([TARGET("the")["input_ids"]]), **options, draft=drafter)
    greedy = base.generate(**padded([TARGET("the")["input_ids"]]), do_sample=False, max_new_tokens=20)
    assert torch.equal(out, greedy)


def test_the_draft_model_reads_each_token_once(pair):
    base, checked = pair
    drafter, fed = DraftModel(checked.small, tokenizer=OWN, target_tokenizer=TARGET), []
    hook = drafter.small.get_input_embeddings().register_forward_hook(lambda m, args, out: fed.append(args[0].numel()))
    out = specheads.generate(
        base, **padded([TARGET(TEXT)["input_ids"]]), draft=drafter, tree=chain(6), do_sample=False,
        max_new_tokens=30, return_dict_in_generate=True,
    )  # fmt: skip
    hook.remove()
    prompt, steps = len(OWN(TEXT)["input_ids"]), len(out.steps) - 1
    assert prompt < fed[0] < prompt + 8, "the prompt and the first token are read in one pass"
    # Of later text it reads what its own drafts did not contain, and tokens that merges changed.
    assert sum(fed[1:]) - 5 * steps < 4 * steps


def test_what_cannot_be_drafted_through_text_is_refused(pair):
    for tree in [SampledTree((1, 1)), StaticTree(((0,), (1,))), AdaptiveChain(sampled=True)]:
        base, checked = pair
        drafter = DraftModel(checked.small, tokenizer=OWN, target_tokenizer=TARGET)
        with pytest.raises(ValueError, match="between two vocabularies a draft is a chain of likeliest tokens, not "):
            specheads.generate(base, torch.tensor([[5]]), draft=drafter, tree=tree, max_new_tokens=4)


def test_a_rule_that_compares_probabilities_is_refused_through_text(pair):
    base, checked = pair
    with pytest.raises(ValueError, match="Checked gives none"):
        specheads.generate(base, torch.tensor([[5, 6, 7]]), draft=checked, accept="fuzzy:js:0.2", max_new_tokens=1)


def test_one_vocabulary_under_two_names_needs_no_text(pair):
    base, _ = pair
    drafter = DraftModel(base, tokenizer=TARGET, target_tokenizer=TARGET)
    options = {"do_sample": False, "max_new_tokens": 12}
    inputs = padded([TARGET("the")["input_ids"]])
    out = specheads.generate(base, **inputs, **options, draft=drafter, tree=SampledTree((2, 1)))
    assert torch.equal(out, base.generate(**inputs, **options))


# --- RetokenizedText ---


def retokenized(text, step):
    """A RetokenizedText extended by `text` in pieces of `step` tokens; checks the number of unchanged ids each time."""
    row, ids = RetokenizedText(OWN, TARGET), TARGET(text)["input_ids"]
    for start in range(0, len(ids), step):
        before = row.ids
        unchanged = row.extend(ids[start : start + step])
        assert before[:unchanged] == row.ids[:unchanged]
        assert unchanged == len(before) or before[unchanged] != row.ids[unchanged : unchanged + 1]
    assert row.num_read == len(ids)
    return row


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_text_in_pieces_has_the_ids_of_the_whole_text(step, monkeypatch):
    monkeypatch.setattr(retokenize, "SETTLED", 64)
    for text in (TEXT * 4, "the cat", "nospaces" * 30, "caté €the cat"):
        row = retokenized(text, step)
        assert row.ids == OWN(text)["input_ids"]
    assert len(retokenized(TEXT * 4, step).tail) <= 64, "settled text was encoded again"


def spaced():
    """OWN, but as Llama's it puts a space before a text, and takes it away when it decodes."""
    tokenizer = copy.deepcopy(OWN)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def spanning():
    """A tokenizer of which one token spans the end of a word and the space after it."""
    tokenizer = toy_tokenizer(["[PAD]", "[BOS]", "[EOS]"], [*string.ascii_lowercase, SPACE], [("t", SPACE)])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


@pytest.mark.parametrize("tokenizer", [spaced(), spanning()], ids=["spaced", "spanning"])
def test_new_text_has_its_ids_after_settled_text(tokenizer, monkeypatch):
    monkeypatch.setattr(retokenize, "SETTLED", 64)
    row = RetokenizedText(tokenizer, TARGET)
    for token in TARGET(TEXT * 4)["input_ids"]:
        row.extend([token])
    assert row.settled and row.ids == tokenizer(TEXT * 4)["input_ids"] != OWN(TEXT * 4)["input_ids"]


def test_a_draft_is_decoded_and_encoded_after_the_text():
    """By tokenizers that put a space before a text: `added` are the ids of " sat" within one."""
    for own, target in [(spaced(), TARGET), (OWN, spaced())]:
        row = RetokenizedText(own, target)
        row.extend(target("the cat")["input_ids"])
        added = TARGET if target is TARGET else OWN
        assert row.to_target_ids(OWN(" sat")["input_ids"]) == added(" sat")["input_ids"]


def test_a_text_begins_as_the_draft_models_tokenizer_begins_it():
    tokenizer = copy.deepcopy(OWN)
    bos = (OWN.bos_token, OWN.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{bos[0]} $A", special_tokens=[bos])
    row = RetokenizedText(tokenizer, TARGET)
    row.extend(TARGET("the cat")["input_ids"])
    assert row.ids == tokenizer("the cat")["input_ids"] == [bos[1], *OWN("the cat")["input_ids"]]


def test_a_character_of_several_tokens_is_drafted_from_its_first_on():
    ids = TARGET("a€b")["input_ids"]
    row = RetokenizedText(OWN, TARGET)
    row.extend(ids[:2])  # the euro sign is three bytes, of which one has come
    assert row.ids == OWN("a")["input_ids"]
    assert row.to_target_ids(OWN("€b")["input_ids"]) == ids[2:]
    assert row.to_target_ids(OWN("xb")["input_ids"]) == []
    assert row.to_target_ids(OWN("€b")["input_ids"][:2]) == []  # and two have been drafted
    row = RetokenizedText(OWN, TARGET)
    row.extend(ids[:1])
    assert row.to_target_ids(OWN("b€")["input_ids"][:2]) == TARGET("b")["input_ids"]  # a byte of it is no character


def test_tokens_that_span_old_and_new_text_are_kept_apart():
    assert encode_after(TARGET, "sat on", " the mat") == TARGET(" the mat")["input_ids"]
    assert encode_after(TARGET, "sat on t", "he mat") == TARGET("he mat")["input_ids"]


def test_the_end_of_text_and_an_empty_text_have_a_token():
    row = RetokenizedText(OWN, TARGET)
    row.extend([TARGET.bos_token_id])
    assert row.ids == [OWN.eos_token_id]
    drafted = [*OWN("the")["input_ids"], OWN.eos_token_id, *OWN("cat")["input_ids"]]
    assert row.to_target_ids(drafted) == [*TARGET("the")["input_ids"], TARGET.eos_token_id]
