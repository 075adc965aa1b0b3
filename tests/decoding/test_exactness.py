"""Real models and heads: sampled text has exactly the base's distribution, greedy text is the base's own."""

from typing import ClassVar

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from specheads import BestFirstTree, DynamicTree, Exact, SampledTree, StaticTree, Target, chain, convert, decode
from specheads.heads.layers.rope import RotaryTable
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import distance, probs_of, stop_after
from tests.support.prompts import padded

HEADS = ("medusa", "hydra", "eagle", "eagle3", "mtp", "parallel")
PAD = 0


# --- The distribution, enumerated in float64 ---


@pytest.mark.parametrize(
    ("vocab_size", "plan", "length", "steps"),
    [
        (4, None, 3, None),
        (4, chain(2), 3, None),
        (4, StaticTree(((0,), (1,), (0, 0), (0, 1))), 3, None),
        (4, DynamicTree(budget=4, depth=2, top_k=2), 3, None),
        (3, BestFirstTree(budget=4, depth=2, width=2), 2, None),
        (4, SampledTree((1,)), 3, 1),
        (3, SampledTree((2,)), 3, 1),
        (2, SampledTree((1, 1)), 3, 1),
        (2, SampledTree((2, 1)), 3, 1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.sampled(7)
def test_sampled_text_has_the_bases_own_distribution(head, vocab_size, plan, length, steps):
    base = small_base(vocab_size)
    torch.manual_seed(1)
    model = convert(base, head, dtype=torch.float64)
    for parameter in model.head.parameters():  # away from the base's own weights, so that q is unlike p
        torch.nn.init.normal_(parameter, std=0.5)
    prompt = (1, 0, 1)
    ids = torch.tensor([prompt])

    def run(sampler):
        target = Target(base, model.head.layers, scratch=plan.num_nodes if plan else 1)
        tokens = ()
        made = decode(
            target, model.head if plan else None, ids, torch.tensor([len(prompt)]), plan=plan, sampler=sampler,
            accept=Exact(), stop=stop_after([prompt], length), max_new_tokens=length,
        )  # fmt: skip
        for number, step in enumerate(made):
            tokens += tuple(step.tokens[0])
            if number == steps:
                break
        return tokens

    base_probs = BaseProbs(base)
    probs = base_probs.extend_outcomes(probs_of(run), prompt, length)
    assert distance(probs, base_probs.joint(prompt, length)) < 1e-12


def test_generate_has_the_bases_processed_distribution(monkeypatch):
    """The same through generate(): temperature and top_k as the base would apply them."""
    base = small_base(4)
    model = convert(base, "eagle3", dtype=torch.float64)

    def processed(logits):
        scores = logits / 0.7
        return scores.masked_fill(scores < scores.sort().values[-2], -torch.inf)

    def run(sampler):
        def make(processors, **kwargs):
            sampler.processors = processors
            return sampler

        monkeypatch.setattr("specheads.decoding.generation.generate.Sampler", make)
        options = {"do_sample": True, "temperature": 0.7, "top_k": 2, "top_p": 1.0, "max_new_tokens": 3}
        out = model.generate(torch.tensor([[1, 0, 3]]), **options, tree=SampledTree((1, 1)))
        return tuple(out[0, 3:].tolist())

    base_probs = BaseProbs(base, processed)
    assert distance(probs_of(run), base_probs.joint((1, 0, 3), 3)) < 1e-12


# --- Greedy, token for token ---


@pytest.fixture(scope="module")
def text(base):
    """(5, 124) greedy text of the base, each row from one token."""
    prompts = torch.tensor([[7], [31], [55], [60], [90]])
    return base.generate(prompts, do_sample=False, max_new_tokens=123, min_new_tokens=123)


class Taught(dict):
    """Heads trained until they know the text, so that drafts are accepted and cut at every depth; each when it is first
    asked for."""

    OPTIONS: ClassVar[dict[str, dict]] = {
        "medusa": {"num_heads": 4},
        "hydra": {"prefix_layer": True},
        "eagle": {"token_loss_weight": 1.0, "noise": 0.0},
        "eagle3": {"steps": 3, "draft_vocab_size": 90},
        "mtp": {"steps": 3, "num_modules": 2},
        "parallel": {"draft_vocab_size": 90, "markov_rank": 16, "block_size": 6, "anchors": 24},
    }

    def __init__(self, base, text):
        super().__init__()
        self.base, self.text = base, text

    def __missing__(self, head):
        torch.manual_seed(0)
        model = self[head] = convert(self.base, head, **self.OPTIONS[head]).train()
        optimizer = torch.optim.AdamW(model.head.parameters(), lr=2e-2)
        for _ in range(50):
            optimizer.zero_grad()
            model(self.text, labels=self.text).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
            optimizer.step()
        return model.eval()


@pytest.fixture(scope="module")
def models(base, text):
    return Taught(base, text)


PLANS = {
    "default": None,
    "chain of 1": chain(1),
    "chain of 4": chain(4),
    "static": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))),
    "dynamic": DynamicTree(budget=10, depth=4, top_k=3),
    "dynamic, wide": DynamicTree(budget=30, depth=2, top_k=8),
    "dynamic, one beam": DynamicTree(budget=4, depth=3, top_k=1),
    "best first": BestFirstTree(budget=10, depth=4, width=3),
    "sampled": SampledTree((3, 2, 1)),
    "sampled chain": SampledTree((1, 1, 1, 1)),
}


@pytest.fixture(scope="module")
def prompts(text):
    """By name: single prompts of 1, 5 and 100 tokens, and the three as one ragged batch."""
    rows = [text[0, :1].tolist(), text[1, :5].tolist(), text[2, :100].tolist()]
    return {len(row): padded([row]) for row in rows} | {"ragged": padded(rows)}


@pytest.fixture(scope="module")
def greedy(base, prompts):
    return {name: base.generate(**inputs, do_sample=False, max_new_tokens=24) for name, inputs in prompts.items()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.sampled(17)
def test_every_head_tree_and_batch_matches_greedy(models, prompts, greedy, head, plan):
    gained = steps = 0
    for name, inputs in prompts.items():
        out = models[head].generate(
            **inputs, draft="head", do_sample=False, max_new_tokens=24, tree=PLANS[plan], return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, greedy[name])
        assert out.lossless
        gained += sum(len(row) for step in out.steps[1:] for row in step.tokens)
        steps += sum(bool(row) for step in out.steps[1:] for row in step.tokens)
    least = 1.2 if plan == "chain of 1" else 1.3  # one draft gains one token at most
    assert gained / steps > least, "hardly a draft was accepted, so this shows little"


def test_plain_decoding_matches_greedy(models, prompts, greedy):
    for name, inputs in prompts.items():
        out = models["eagle"].generate(**inputs, do_sample=False, max_new_tokens=24, draft=False)
        assert torch.equal(out, greedy[name])


def test_a_head_that_knows_nothing_is_lossless_too(base, prompts, greedy):
    for head in HEADS:
        model = convert(base, head, init=False)
        out = model.generate(**prompts["ragged"], do_sample=False, max_new_tokens=24, draft=True)
        assert torch.equal(out, greedy["ragged"])


def test_a_head_of_two_layers_matches_greedy(base, prompts, greedy):
    torch.manual_seed(0)
    for model in (convert(base, "eagle", num_layers=2), convert(base, "eagle3", num_layers=2)):
        out = model.generate(**prompts["ragged"], do_sample=False, max_new_tokens=24, draft=True)
        assert torch.equal(out, greedy["ragged"])


@pytest.mark.sampled(17)
@pytest.mark.parametrize("plan", ["chain of 4", "static", "dynamic", "sampled"])
@pytest.mark.parametrize("head", HEADS)
def test_an_ending_inside_a_draft_matches_greedy(base, models, text, head, plan):
    """Every token of the continuation in turn as EOS, and every length limit, cut drafts at all their depths."""
    inputs = padded([text[3, :4].tolist(), text[4, :9].tolist()])
    columns = inputs["input_ids"].shape[1]
    model, tree = models[head], PLANS[plan]
    continued = base.generate(**inputs, do_sample=False, max_new_tokens=10, eos_token_id=96, pad_token_id=PAD)
    cut = False
    for token in sorted(set(continued[:, columns:].flatten().tolist())):
        options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": [token, 96], "pad_token_id": PAD}
        out = model.generate(**inputs, **options, tree=tree, return_dict_in_generate=True)
        assert torch.equal(out.sequences, base.generate(**inputs, **options))
        # A step that ends on an accepted token, not on the bonus, was cut.
        cut |= any(len(row) == n > 0 for step in out.steps for row, n in zip(step.tokens, step.accepted, strict=True))
        assert all(
            len(ranks) == n
            for step in out.steps
            for ranks, n in zip(step.ranks, step.accepted, strict=True)
        )  # fmt: skip
    assert cut, "no EOS cut a draft"
    for limit in range(1, 8):
        options = {"do_sample": False, "max_new_tokens": limit}
        assert torch.equal(model.generate(**inputs, **options, tree=tree), base.generate(**inputs, **options))
    options = {"do_sample": False, "max_length": columns + 5}
    assert torch.equal(model.generate(**inputs, **options, tree=tree), base.generate(**inputs, **options))


def test_generation_reaches_the_end_of_a_learned_position_table():
    for head in HEADS:
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
        config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=PAD, initializer_range=0.3)
        base = GPT2LMHeadModel(config).eval()
        model = convert(base, head)
        generator = torch.Generator().manual_seed(2)
        inputs = padded([torch.randint(3, 97, (n,), generator=generator).tolist() for n in (20, 7, 1)])
        greedy = base.generate(**inputs, do_sample=False, max_new_tokens=12)
        for plan in (None, chain(4), SampledTree((2, 1, 1)), DynamicTree(budget=8, depth=4, top_k=2)):
            assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=12, tree=plan), greedy)


@pytest.mark.parametrize("head", ["hydra", "eagle", "eagle3", "parallel"])
def test_no_position_lies_outside_the_table_the_head_asked_for(models, text, head, monkeypatch):
    """A row that ends by a whole accepted path overshoots the limit and stays in the batch while others run on."""
    asked, used = [0], [0]
    ensure, forward = RotaryTable.ensure, RotaryTable.forward

    def recording_ensure(table, positions, like):
        asked.append(positions)
        ensure(table, positions, like)

    def recording_forward(table, position):
        used.append(int(position.max()))
        return forward(table, position)

    monkeypatch.setattr(RotaryTable, "ensure", recording_ensure)
    monkeypatch.setattr(RotaryTable, "forward", recording_forward)
    inputs = padded([row[:40].tolist() for row in text])
    for limit in range(3, 9):  # of two tokens the second is the only step, which drafts nothing
        asked[:], used[:] = [0], [0]
        models[head].generate(
            **inputs, do_sample=False, max_new_tokens=limit, eos_token_id=96, tree=chain(4 if head == "hydra" else 6)
        )
        assert max(used) < max(asked)
