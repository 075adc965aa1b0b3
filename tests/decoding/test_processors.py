"""Logits processors over trees and batches: what each is shown, where none is asked, and those that keep state."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specheads import DraftTree, SampledTree, chain, convert
from specheads.decoding.probs.processors import Grammar, snapshot
from specheads.decoding.schedule import end_mask
from tests.support.prompts import BATCHES, PAD, PROMPTS, V
from tests.support.replay_drafter import Replay, assert_same
from tests.support.tiny_models import tiny_llama

EOS = 2
STEPS = 14  # that the grammar below takes, the end of text included


def grammar(prompts):
    """prefix_allowed_tokens_fn of a text of STEPS tokens: each within ten of a third of the vocabulary, which follows
    from the one before, then the end. Like a strict automaton it raises for a prefix that it did not allow, allows
    nothing after the end, and knows rows by their index."""

    def following(generated):
        if len(generated) == STEPS - 1:
            return [EOS]
        start = 3 + 7 * (sum(generated) + len(generated)) % 80
        return [*range(start, start + 10)]

    def allowed(row, sent):
        ids = sent.tolist()
        assert ids[: len(prompts[row])] == prompts[row], "another row's text, or padding that is not the caller's"
        generated = ids[len(prompts[row]) :]
        while generated[-1:] == [PAD]:  # a row that has ended, as Hugging Face pads it
            generated.pop()
        for i, token in enumerate(generated):
            assert token in following(generated[:i]), f"{token} was not allowed after {generated[:i]}"
        return [] if generated[-1:] == [EOS] else following(generated)

    return allowed


def prompts_of(inputs):
    return inputs["input_ids"].tolist()


@pytest.mark.parametrize("batch", BATCHES)
def test_a_grammar_that_has_ended_is_not_called_again(model, batch):
    inputs = BATCHES[batch]
    options = {"max_new_tokens": 24, "eos_token_id": EOS, "pad_token_id": PAD}

    def robust(row, sent):  # generate() itself asks finished rows of a batch again
        return grammar(prompts_of(inputs))(row, sent) or [PAD]

    expected = model.base.generate(**inputs, **options, do_sample=False, prefix_allowed_tokens_fn=robust)
    assert expected.shape[1] == inputs["input_ids"].shape[1] + STEPS
    strict = {"prefix_allowed_tokens_fn": grammar(prompts_of(inputs)), "reference": expected}
    assert_same(model, inputs, **options, **strict, accepted=1.3)
    for seed in range(4):
        for tree in (None, chain(3), SampledTree((2, 2))):
            out = model.generate(
                **inputs, **options, do_sample=True, seed=seed, tree=tree,
                prefix_allowed_tokens_fn=grammar(prompts_of(inputs)),
            )  # fmt: skip
            assert (out[:, -1] == EOS).all() and out.shape == expected.shape


class NothingAfter(LogitsProcessor):
    """Rules every token out after an end of text."""

    depends_on_prefix_only = True

    def __call__(self, input_ids, scores):
        return scores.masked_fill((input_ids == EOS).any(1, keepdim=True), -torch.inf)


def test_a_processor_that_allows_nothing_after_an_end_is_no_reason_to_stop(model):
    for seed in range(12):
        options = {"max_new_tokens": 16, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True, "top_k": 0}
        more = {"sequence_bias": [[[EOS], 4.0]], "logits_processor": LogitsProcessorList([NothingAfter()])}
        for tree in (None, SampledTree((2, 2, 1))):
            out = model.generate(**BATCHES["ragged"], **options, **more, seed=seed, tree=tree)
            assert EOS in out[:, 9:]


class Table(LogitsProcessor):
    """Bans by a table of exactly as many steps as there are tokens to write."""

    depends_on_prefix_only = True

    def __init__(self, columns, steps):
        self.columns, self.banned = columns, [[3 + (7 * i) % 90, 4 + (5 * i) % 90] for i in range(steps)]

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.banned[input_ids.shape[1] - self.columns]] = -torch.inf
        return scores


def test_a_table_of_as_many_steps_as_tokens_is_enough(model):
    for batch in BATCHES:
        table = Table(BATCHES[batch]["input_ids"].shape[1], 24)
        assert_same(model, BATCHES[batch], logits_processor=LogitsProcessorList([table]), eos_token_id=None)


def test_nothing_follows_an_end_or_the_last_token_there_is_room_for():
    tokens = torch.tensor([[5, EOS, 7, 8, 9, 6], [EOS, 4, 6, 7, EOS, 3], [5, 6, 7, 8, 9, 3]])
    parents = torch.tensor([[-1, 0, 1, 2, 0, 4]] * 3)
    marked = end_mask(DraftTree(tokens, parents, 3), torch.tensor([EOS]), [9, 2, 0])
    assert marked.tolist() == [
        [False, True, True, True, False, False], [False, False, True, True, True, True], [True] * 6,
    ]  # fmt: skip


class Shown(LogitsProcessor):
    depends_on_prefix_only = True

    def __init__(self):
        self.rows = []

    def __call__(self, input_ids, scores):
        self.rows += input_ids.tolist()
        return scores


def test_processors_see_the_padding_that_the_caller_gave():
    """60, say, where the model's own padding id is 0; as in generate(), wherever it is."""
    for side in ["left", "right"]:
        longest = max(map(len, PROMPTS))
        rows = [
            [60] * (longest - len(row)) + row if side == "left" else row + [60] * (longest - len(row))
            for row in PROMPTS
        ]
        masks = [[int(side == "right") ^ (i < longest - len(row)) ^ 1 for i in range(longest)] for row in PROMPTS]
        if side == "right":
            masks = [[int(i < len(row)) for i in range(longest)] for row in PROMPTS]
        shown, base = Shown(), tiny_llama()
        torch.manual_seed(0)
        convert(base, "eagle3").generate(  # some of whose drafts are right
            torch.tensor(rows), attention_mask=torch.tensor(masks), do_sample=False, max_new_tokens=8, draft="head",
            logits_processor=LogitsProcessorList([shown]),
        )  # fmt: skip
        assert len(shown.rows) > 24 and {tuple(row[:longest]) for row in shown.rows} == set(map(tuple, rows))


class Ascending(LogitsProcessor):
    """Moves the scores along a gradient, and keeps the last ones."""

    def __call__(self, input_ids, scores):
        self.scores = scores
        with torch.enable_grad():
            moved = scores.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(moved.softmax(-1).pow(2).sum(), moved)
        return scores - 40 * gradient

    depends_on_prefix_only = True


def test_a_processor_may_use_gradients(model):
    processor, weight = Ascending(), torch.ones(V, requires_grad=True)
    out = assert_same(model, BATCHES["ragged"], logits_processor=LogitsProcessorList([processor]))
    assert out.statistics()["drafted"] > 0
    (processor.scores * weight).sum().backward()
    assert weight.grad is not None


# --- Processors that keep state ---


class Counting(LogitsProcessor):
    """Bans by how often it was asked, as it may where each call is a token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 2 :: 2] = -torch.inf
        return scores


class Remembering(Counting):
    """The same, its state in an object and a tensor."""

    def __init__(self):
        self.inner = Counting()
        self.last = torch.zeros(1, dtype=torch.long)

    def __call__(self, input_ids, scores):
        self.last += 1
        return self.inner(input_ids, scores)


class Hidden(Counting):
    """The same, its state where nothing can be seen of it."""

    def __init__(self):
        def turns():
            calls = 0
            while True:
                calls += 1
                yield calls

        self.turns = turns()

    @property
    def calls(self):
        return next(self.turns)

    @calls.setter
    def calls(self, value):
        pass


def closure():
    """The same as a function, its state in a variable of the function around it."""
    counting = Counting()

    def function(input_ids, scores):
        return counting(input_ids, scores)

    return function


def rebinding():
    calls = 0

    def function(input_ids, scores):
        nonlocal calls
        calls += 1
        return scores.index_fill(1, torch.arange(calls % 2, scores.shape[1], 2), -torch.inf)

    return function


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("processor", [Counting, Remembering, Hidden, closure, rebinding])
def test_a_processor_that_keeps_state_stops_the_drafting_with_a_warning(model, processor, batch, hf_log):
    inputs, options = BATCHES[batch], {"do_sample": False, "max_new_tokens": 16, "eos_token_id": 5, "pad_token_id": PAD}
    expected = model.base.generate(**inputs, **options, logits_processor=LogitsProcessorList([processor()]))
    assert not torch.equal(expected, model.base.generate(**inputs, **options))
    out = model.generate(
        **inputs, **options, logits_processor=LogitsProcessorList([processor()]), return_dict_in_generate=True,
        output_scores=True, draft=Replay(inputs, expected),
    )  # fmt: skip
    assert torch.equal(out.sequences, expected) and out.statistics()["drafted"] == 0
    warnings = [record.message for record in hf_log.records if "keeps state" in record.message]
    name = processor.__name__ if isinstance(processor, type) else "function"
    assert len(warnings) == 1 and name in warnings[0] and "depends_on_prefix_only" in warnings[0]


class Unchanged(LogitsProcessor):
    """Keeps what it was given and never changes it."""

    def __init__(self):
        self.banned, self.names = torch.tensor([10, 11, 12]), {"a": [1, 2.0, "b"], "self": self}

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, self.banned, -torch.inf)


def unchanged():
    """As a function, which keeps what the function around it was given."""
    same = Unchanged()
    return lambda input_ids, scores: same(input_ids, scores)


@pytest.mark.parametrize("processor", [Unchanged, unchanged])
def test_a_processor_that_never_changes_is_drafted_for(model, processor, hf_log):
    out = assert_same(model, BATCHES["ragged"], logits_processor=LogitsProcessorList([processor()]))
    assert out.statistics()["drafted"] > 0 and "keeps state" not in hf_log.text


def test_a_snapshot_changes_with_the_state():
    class Holder:
        def __init__(self):
            self.parts = [torch.zeros(2), {"k": {1, 2}}, (b"x", 1.5), torch.Generator().manual_seed(0), range(3)]

    holder = Holder()
    seen = [snapshot(holder)]
    assert seen[0] is not None and seen[0] == snapshot(holder)
    holder.parts[0][1] = 3
    seen.append(snapshot(holder))
    holder.parts[1]["k"].add(9)
    seen.append(snapshot(holder))
    torch.rand(1, generator=holder.parts[3])
    seen.append(snapshot(holder))
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    assert snapshot([lambda: 0, torch.nn.Linear(2, 2)]) is not None
    assert snapshot([iter([1])]) is not None and snapshot(i for i in range(3)) is None


# --- A real library of that kind ---


@pytest.fixture(scope="module")
def compiled():
    """Every letter is a token of its own, and so are the end of text and digits: a grammar over a vocabulary of 97."""
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    vocab = ["<pad>", "<s>", "</s>", *[chr(i) for i in range(33, 127)]]
    assert len(vocab) == V
    info = xgrammar.TokenizerInfo(vocab, vocab_size=V, stop_token_ids=[EOS])
    text = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z] [a-z] | [0-9] [0-9] [0-9]'
    return xgrammar.GrammarCompiler(info).compile_grammar(text)


def test_a_grammar_is_rolled_back_from_its_end(compiled):
    """To a sibling of a node before the end ($), as in a tree of drafts whose end of text ends nothing else."""
    from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

    def masked(judge, text):
        return judge.row(0, [5, *(EOS if char == "$" else ord(char) - 30 for char in text)], torch.zeros(V))

    tree = Grammar(GrammarProcessor(compiled))
    for text in ("", "[ab", "[ab]", "[ab]$", "[ab,", "[ab]$$", "[ab,1"):
        path = Grammar(GrammarProcessor(compiled))
        masked(path, "")
        assert torch.equal(masked(tree, text), masked(path, text))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_grammar_library_judges_trees_of_drafts(model, compiled, batch, ends):
    """ends: is the grammar's last token the end of text? Else the library continues with its last mask."""
    from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

    inputs = BATCHES[batch]
    options = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": EOS if ends else 1, "pad_token_id": PAD}
    bias = {"sequence_bias": [[[i], 3.0] for i in (3 + ord("]") - 33, EOS)]}  # so that some rows end early
    expected = model.base.generate(
        **inputs, **options, **bias, logits_processor=LogitsProcessorList([GrammarProcessor(compiled)])
    )
    own = LogitsProcessorList([GrammarProcessor(compiled)])
    out = model.generate(
        **inputs, **options, **bias, logits_processor=own, draft=Replay(inputs, expected), return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected) and out.statistics()["accepted_length"] > 1.3
    assert EOS in expected
    for seed in range(6):  # one processor serves several calls, and sampled texts keep to the grammar
        sampled = model.generate(
            **inputs, **{**options, "do_sample": True}, logits_processor=own, seed=seed, tree=SampledTree((2, 2, 1))
        )
        for row in sampled[:, inputs["input_ids"].shape[1] :].tolist():
            text = "".join(chr(30 + i) for i in (row[: row.index(EOS)] if EOS in row else row))
            assert text.startswith("[") and (EOS not in row or text.endswith("]"))
            for item in text.strip("[]").split(",")[:-1]:
                assert (len(item) == 2 and item.isalpha()) or (len(item) == 3 and item.isdigit()), text
