"""The parallel block head: the blocks it trains on, the logits of every node of a tree, and its confidence."""

import pytest
import torch
from peft import LoraConfig

from specheads import AdaptiveChain, BestFirstTree, UnsupportedModel, chain, convert
from specheads.data.datasets import Collator, pack
from specheads.decoding.planner import ChildLogits
from specheads.heads import parallel, sampling
from specheads.heads.parallel import ParallelConfig
from specheads.heads.sampling import AnchoredBlocks
from specheads.losses.targets import tokens_left
from tests.reference.slow_heads import FORMS, rows, slow_block, slow_parallel, slow_slots, spec_model, taps
from tests.support.families import FAMILIES, build
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import tiny_llama


def batch_of(*lengths):
    """Rows of packed and padded documents with gaps in what is supervised: supervised and documents (B, T)."""
    packed = [pack(rows(*some, seed=sum(some)), sum(some))[0] for some in lengths]
    batch = Collator(0)(packed)
    return batch["labels"] != -100, batch["document_ids"], batch["input_ids"]


@pytest.mark.parametrize("size", [1, 3, 20])
def test_the_targets_of_a_block_end_before_the_first_token_without_supervision(size):
    supervised, documents, tokens = batch_of((9, 5), (12,), (4, 3, 6))
    blocks = AnchoredBlocks.sample(supervised, documents, size)
    expected = {}
    for b in range(3):
        for a in range(1, 14):
            run = 0
            while (
                run < size and a + 1 + run < 14 and supervised[b, a + 1 + run]
                and documents[b, a - 1] == documents[b, a + 1 + run] > 0
            ):  # fmt: skip
                run += 1
            if run:
                expected[b, a] = run
    found = {}
    for b, a, learned in zip(
        torch.arange(3).repeat_interleave(blocks.anchors.shape[1]), blocks.anchors.flatten(),
        blocks.learned.flatten(0, 1), strict=True,
    ):  # fmt: skip
        if learned.any():
            found[int(b), int(a)] = int(learned.sum())
            assert learned[: found[int(b), int(a)]].all()
    assert found == expected and (blocks.weights == 1).all()
    # Slot j has the target j + 1 tokens after its anchor, of a draft that starts at the token before the anchor.
    targets = blocks.targets(tokens, tokens_left(supervised, documents))
    flat = [(b * 14 + a + j, b * 14 + a - 1, j) for (b, a), run in sorted(expected.items()) for j in range(run)]
    columns = [targets.positions, targets.starts[:, 0], targets.depths[:, 0]]
    assert list(zip(*(t.tolist() for t in columns), strict=True)) == flat
    assert torch.equal(targets.tokens, tokens.flatten()[targets.positions + 1])


def test_sampled_blocks_represent_all_of_their_row_and_follow_the_seed():
    supervised, documents, tokens = batch_of((9, 5), (12,), (4, 3, 6))
    every = AnchoredBlocks.sample(supervised, documents, 2)
    total, seen = every.learned.sum((1, 2)).float(), torch.zeros_like(supervised, dtype=torch.float)
    for seed in range(300):
        some = AnchoredBlocks.sample(supervised, documents, 2, 3, sampling.random_keys(tokens, documents, seed))
        kept = some.learned[:, :, 0]
        assert (kept.sum(1) == every.learned[:, :, 0].sum(1).clamp(max=3)).all()
        assert torch.equal((kept * some.weights).sum(1), every.learned[:, :, 0].sum(1).float())
        seen.scatter_add_(1, some.anchors, (kept * some.weights) / 300)
    able = torch.zeros_like(seen).scatter_(1, every.anchors, every.learned[:, :, 0].float()) > 0
    assert (seen[~able] == 0).all() and ((seen[able] - 1).abs() < 0.5).all() and total.min() > 0
    again = AnchoredBlocks.sample(supervised, documents, 2, 3, sampling.random_keys(tokens, documents, 299))
    assert torch.equal(again.anchors, some.anchors)


def test_a_step_on_sampled_anchors_has_the_loss_of_those_blocks():
    model = spec_model("parallel", anchors=3, confidence=True).train()
    data = rows(12, 9)
    batch = Collator(0)(data)
    model.draw_seed = 4
    loss = model(**batch).loss
    keys = sampling.random_keys(batch["input_ids"], batch["attention_mask"], 4)
    blocks = AnchoredBlocks.sample(batch["labels"] != -100, batch["attention_mask"], 3, 3, keys)
    slow = 0.0
    for row, anchors, learned, weights in zip(data, blocks.anchors, blocks.learned, blocks.weights, strict=True):
        chosen = [int(a) for a, kept in zip(anchors, learned[:, 0], strict=True) if kept]
        assert len(chosen) == 3 and float(weights[0]) > 1
        slow = slow + float(weights[0]) * slow_parallel(model, row, chosen)[0]
    tokens = sum(label != -100 for row in data for label in row["labels"])
    assert loss.item() == pytest.approx(float(slow.detach()) / tokens, rel=1e-6)
    model.draw_seed = None
    assert model(**batch).loss.item() != loss.item(), "other anchors"


def test_the_loss_does_not_depend_on_the_slots_of_a_pass(monkeypatch):
    model, batch = spec_model("parallel").eval(), Collator(0)(rows(12, 9))
    whole = model(**batch).loss.item()
    monkeypatch.setitem(parallel.SLOTS_AT_ONCE, "cpu", 6)
    assert model(**batch).loss.item() == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"causal": c, "sample_from_anchor": a, "block_size": 4 if a else 5}
            for c in (True, False)
            for a in (True, False)
        ),
        *({**options, "block_size": 4 + (not options.get("sample_from_anchor", True))} for options in FORMS.values()),
    ],
)
def test_every_node_of_a_tree_has_the_logits_after_its_own_path(options):
    model = spec_model("parallel", **{"draft_vocab_size": 40, **options, "confidence": True}).eval()
    seen, config = [], model.head.config

    class Recorded(BestFirstTree):
        def grow(self, root, expand, sampler, vocab_size):
            def noted(tokens, parents):
                scored = expand(tokens, parents)
                width, sure = tokens.shape[1], scored.confidence()
                seen.append((tokens, parents, scored.logits.expand(-1, width, -1), sure))
                return scored

            return super().grow(root, noted, sampler, vocab_size)

    out = model.generate(**padded(PROMPTS), max_new_tokens=5, do_sample=False, tree=Recorded(12, 3, 3))
    first = padded(PROMPTS)["input_ids"].shape[1]
    assert [tokens.shape[1] for tokens, *_ in seen[:3]] == [1, 3, 9]
    for b, prompt in enumerate(PROMPTS):
        text = [*prompt, int(out[b, first])]
        block = slow_block(model, text, taps(model, text)[0], len(prompt), config.block_size)[config.silent_slots :]
        paths = [()]
        for tokens, parents, scored, confidence in seen[:3]:
            above = [0] if parents is None else parents[b].tolist()
            paths = [(*paths[node], token) for node, token in zip(above, tokens[b].tolist(), strict=True)]
            for i, path in enumerate(paths):
                unary, logits, sure = slow_slots(model, block, path)[-1]
                if config.markov_type == "selector":
                    kept = unary.sort(descending=True, stable=True).indices[: config.candidates]
                    logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
                torch.testing.assert_close(scored[b, i], logits, rtol=1e-5, atol=1e-5)
                assert float(confidence[b, i]) == pytest.approx(sure.sigmoid().item(), rel=1e-5)


@pytest.mark.parametrize(("from_anchor", "slots"), [(True, 3), (False, 4)])
def test_a_block_is_one_pass_of_no_more_slots_than_the_tree_has_levels(from_anchor, slots, monkeypatch):
    model = spec_model("parallel", sample_from_anchor=from_anchor, block_size=6).eval()
    passes, forward = [], type(model.head).forward
    monkeypatch.setattr(
        type(model.head), "forward", lambda self, x, *rest: passes.append(x.shape[1]) or forward(self, x, *rest)
    )
    out = model.generate(
        **padded(PROMPTS), max_new_tokens=9, tree=BestFirstTree(20, 3, 3), return_dict_in_generate=True
    )
    gained, slots_of = [1] * len(PROMPTS), []
    for step in out.steps[1:]:  # towards the end trees are as deep as there is room for
        depth = min(3, 9 - min(gained) - 1)
        slots_of += [slots - 3 + depth] if depth else []
        gained = [n + len(row) for n, row in zip(gained, step.tokens, strict=True)]
    assert passes == slots_of


def test_low_confidence_ends_an_adaptive_chain():
    model = spec_model("parallel", confidence=True, block_size=5).eval()
    drafted = []
    for bias in (-50.0, 50.0):
        with torch.no_grad():
            model.head.confidence.bias.fill_(bias)
        out = model.generate(
            **padded(PROMPTS[:1]), max_new_tokens=20, tree=AdaptiveChain(5, 0.5), return_dict_in_generate=True
        )
        drafted.append({n for step in out.steps[1:3] for n in step.drafted})  # far from the limit
    assert drafted == [{1}, {5}]
    assert ChildLogits(torch.zeros(1, 1, 3)).confidence is None


def test_a_wrong_option_is_refused(base):
    for options, message in (
        ({"block_size": 0}, "block_size=0 "),
        ({"block_size": 1, "sample_from_anchor": False}, "a block of one slot, the root's, drafts nothing"),
        ({"decay": 0}, "decay=0 "),
        ({"mask_token_id": 97}, "mask_token_id=97 is no token of a vocabulary of 97"),
        ({"taps": [10]}, "tapped layer 10 does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(base, "parallel", **options)


def test_the_usual_tree_is_no_deeper_than_its_nodes_allow(base):
    own = {"sample_from_anchor": False}
    for options, deep in (
        ({}, {"cpu": 7, "cuda": 8}), ({"block_size": 3}, {"cpu": 3, "cuda": 3}), (own, {"cpu": 7, "cuda": 7}),
        ({"block_size": 3, **own}, {"cpu": 2, "cuda": 2}),
    ):  # fmt: skip
        head = convert(base, "parallel", **options).head
        for device, depth in deep.items():
            plan = head.usual_plan(torch.device(device))
            assert plan.depth == depth == len(plan.level_beams) + 1


def test_a_tree_deeper_than_the_block_drafts_is_refused(base):
    for from_anchor, most in ((True, 3), (False, 2)):
        model = convert(base, "parallel", block_size=3, sample_from_anchor=from_anchor)
        with pytest.raises(ValueError, match=rf"a tree {most + 1} deep needs .* drafts {most} \(block_size=3\)"):
            model.generate(torch.tensor([[5]]), tree=chain(most + 1), max_new_tokens=8)
        assert model.generate(torch.tensor([[5]]), tree=chain(most), max_new_tokens=4).shape == (1, 5)


def test_taps_are_spread_evenly_and_fit_small_bases():
    assert ParallelConfig.default_taps(36) == (2, 10, 18, 26, 34)
    for layers in range(1, 60):
        taps = ParallelConfig.default_taps(layers)
        assert 1 <= len(taps) <= 5 and taps[0] >= 1 and taps[-1] <= layers and list(taps) == sorted(set(taps))


def test_a_base_whose_logits_are_more_than_its_output_rows_gets_no_draft_vocabulary():
    capped, biased, adapted = build(*FAMILIES["Gemma-2"]), build(*FAMILIES["Phi"]), tiny_llama(num_hidden_layers=2)
    torch.nn.init.normal_(biased.get_output_embeddings().bias)
    adapted.add_adapter(LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    for base in (capped, biased, adapted):
        convert(base, "parallel")
        with pytest.raises(UnsupportedModel, match=r"scales, caps or shifts its logits \(a bias, an adapter\)"):
            convert(base, "parallel", draft_vocab_size=20)


def test_the_base_output_rows_of_a_draft_vocabulary_stay_as_they_are(base, tmp_path):
    model = convert(base, "parallel", draft_vocab_size=40)
    model.head.set_draft_vocabulary(torch.arange(97), base)
    ids = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(model.head.lm_head.weight, base.lm_head.weight[57:])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, base=base)
    assert not again.head.lm_head.weight.requires_grad and torch.equal(again.head.target_ids, torch.arange(57, 97))
    texts = [one.generate(ids, max_new_tokens=6, draft="head") for one in (again, model)]
    assert torch.equal(*texts)


def test_the_frozen_output_rows_are_the_bases_whatever_the_head_starts_from(base):
    head = convert(base, "parallel", draft_vocab_size=40, init=False).head
    assert torch.equal(head.lm_head.weight, base.lm_head.weight[:40])
    with pytest.raises(ValueError, match="give the base with the token counts"):
        head.set_draft_vocabulary(torch.arange(97))
    assert torch.equal(head.target_ids, torch.arange(40)), "refused before anything changed"


@pytest.mark.parametrize("supervised", [True, False])
def test_a_process_with_fewer_blocks_than_others_runs_its_layers_as_often_and_learns_the_same(supervised, monkeypatch):
    model = spec_model("parallel", block_size=3, markov_rank=4, confidence=True)
    model.train()
    batch = Collator(0)(rows(9, 6))
    if not supervised:
        batch["labels"].fill_(-100)
    calls, results = [], []
    model.head.norm.register_forward_hook(lambda *_: calls.append(1))
    for of_all in (lambda count, device: count, lambda count, device: max(count, 3)):
        monkeypatch.setattr(parallel, "calls_of_all", of_all)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.head.named_parameters() if p.requires_grad and p.grad is not None}
        results.append((loss.detach(), grads, len(calls)))
        calls.clear()
    (alone, own, _), (beside, padded_grads, count) = results
    assert count == 3 and torch.equal(alone, beside) and (alone > 0) == supervised and own.keys() == padded_grads.keys()
    for name, grad in own.items():
        torch.testing.assert_close(padded_grads[name], grad, msg=name)
