"""The loss in chunks equals the loss in one piece: value, gradients, ranks and α, for every loss and every teacher."""

import math

import pytest
import torch

from benchmarks.live_memory import LiveMemory
from specheads.data.datasets import Collator
from specheads.decoding.verify.taps import concat_taps, hidden_state_indices
from specheads.losses import chunked, objective
from specheads.losses.chunked import chunked_sum
from specheads.losses.functions import DISTRIBUTION_LOSSES, HARD, parse_loss, position_weights
from specheads.losses.targets import ENDED, DraftTargets
from specheads.losses.teacher import LiveTeacher, tap_base
from specheads.models.convert import convert
from tests.reference.slow_heads import DEFAULTS, KINDS, rows
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.families import FAMILIES, build
from tests.support.tiny_models import tiny_llama

ROWS, HIDDEN, VOCAB = 13, 6, 11


def plain(z, t, token, name):
    """Each loss from probabilities, as its definition reads."""
    q, p = z.softmax(-1), t.softmax(-1)
    m = (p + q) / 2
    alpha = torch.minimum(p, q).sum(-1)
    kl_pq = (p * (p / q).log()).sum(-1)
    return {
        "hard": -q.gather(1, token.unsqueeze(1)).squeeze(1).log(),
        "ce": -(p * q.log()).sum(-1),
        "kl": kl_pq,
        "kl_reversed": (q * (q / p).log()).sum(-1),
        "js": ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
        "tv": (p - q).abs().sum(-1) / 2,
        "lk": -alpha.log(),
        "lk_hybrid": (-3 * alpha).exp().detach() * kl_pq + (1 - (-3 * alpha).exp().detach()) * (1 - alpha),
    }[name]


@pytest.mark.parametrize("chunk", [1, 4, 13, 64])
@pytest.mark.parametrize("name", [HARD, *DISTRIBUTION_LOSSES])
def test_a_loss_in_chunks_has_the_value_and_gradients_of_the_plain_form(name, chunk):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    hidden, weight, teacher = draw(ROWS, HIDDEN).requires_grad_(), draw(VOCAB, HIDDEN).requires_grad_(), draw(ROWS, 11)
    token, scale = torch.randint(0, VOCAB, (ROWS,), generator=generator), draw(ROWS).abs()

    def compute(add, here, part):
        log_q = (part @ weight.T).log_softmax(-1)
        own = -log_q.gather(1, token[here].unsqueeze(1)).squeeze(1)
        loss = own if name == HARD else DISTRIBUTION_LOSSES[name](log_q, teacher[here].log_softmax(-1))
        add((loss * scale[here]).sum())
        return (log_q.argmax(-1),)

    total, (best,) = chunked_sum(compute, [hidden], [weight], chunk)
    grads = torch.autograd.grad(total * 0.7, [hidden, weight])
    z = hidden @ weight.T
    expected = (plain(z, teacher, token, name) * scale).sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-13)
    assert torch.equal(best, z.argmax(-1)) and not best.requires_grad
    for grad, slow in zip(grads, torch.autograd.grad(expected * 0.7, [hidden, weight]), strict=True):
        torch.testing.assert_close(grad, slow, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("most", [3, 5])
def test_under_zero3_chunks_are_recomputed_to_the_same_gradients_and_as_many_as_any_process_has(monkeypatch, most):
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=torch.float64))
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    calls = []

    def compute(add, here, part):
        calls.append(len(part))
        losses = []
        for some in (part[:1], part[1:]):
            losses.append((some @ weight.T).logsumexp(-1))
            add(losses[-1].sum())
        return (torch.cat(losses).detach(),)

    found = []
    for sharded in (False, True):
        monkeypatch.setattr(chunked, "is_deepspeed_zero3_enabled", lambda sharded=sharded: sharded)
        monkeypatch.setattr(chunked, "calls_of_all", lambda count, device: most)
        calls.clear()
        total, (each,) = chunked_sum(compute, [hidden], [weight], 5)
        assert calls == [5, 5, 3] + [0] * (most - 3) * sharded
        found.append([total, each, *torch.autograd.grad(total, [hidden, weight])])
    for once, again in zip(*found, strict=True):
        torch.testing.assert_close(once, again)


def test_of_equally_likely_drafts_the_first_is_the_one_argmax_takes():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    for row, expected in ((0, [3, 0, 1, 2]), (1, [0, 1, 2, 3])):
        ranks = [int(objective.rank_of(logits[row : row + 1], torch.tensor([t]))) for t in range(4)]
        assert ranks == expected and ranks.index(0) == int(logits[row].argmax())
    assert objective.rank_of(logits, torch.tensor([-1, 0])).tolist() == [-1, 0]


@pytest.mark.filterwarnings("error:Mismatch dtype")  # of a norm's input and its scale, which takes a slower path
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_losses_and_gradients_are_those_of_float32_to_its_rounding(kind, monkeypatch):
    monkeypatch.setattr(objective, "rows_of_chunk", lambda *_: 3)  # several chunks share autocast's cast weights
    # The layers of an MTP head are as random as the base's, and errors grow with each step through them.
    base = tiny_llama(initializer_range=0.1) if kind == "mtp" else tiny_llama()
    model = convert(base, kind, **DEFAULTS[kind]).train()
    batch, found = Collator(0)(rows(9, 7)), []
    torch.set_warn_always(True)
    for enabled in (False, True):
        torch.manual_seed(0)  # of drawn anchors
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = model(**batch).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.head.parameters() if p.grad is not None)])
    torch.set_warn_always(False)
    assert len(found[0]) == len(found[1]) > 1
    assert float(found[1][0]) == pytest.approx(float(found[0][0]), rel=0.02)
    for plain, cast in zip(*found, strict=True):
        assert float((plain - cast).norm()) <= 0.1 * float(plain.norm()) + 1e-3


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("eagle3", {"loss": name}) for name in (*DISTRIBUTION_LOSSES, "hard:0.1,tv:1.8")),
        ("eagle3", {"draft_vocab_size": 97, "loss": "lk", "dpace": 0.5}),
        ("medusa", {"loss": "lk_hybrid", "draft_vocab_size": 40}),
        ("medusa", {"dpace": 0.5}),
        ("hydra", {"loss": "hard:0.1,lk"}),
        ("eagle", {"steps": 3, "loss": "tv"}),
        ("parallel", {"dpace": 0.5, "loss": "lk", "confidence": True}),
    ],
)  # fmt: skip
def test_every_loss_trains_every_head_alike_in_any_chunks(kind, options, monkeypatch):
    model, data = spec_model(kind, **options).train(), rows(9, 7)
    batch = Collator(0)(data)
    found = []
    for size in (1, 3, 1000):
        monkeypatch.setattr(objective, "rows_of_chunk", lambda *_, size=size: size)
        out = model(**batch)
        grads = torch.autograd.grad(out.loss, list(model.head.parameters()), allow_unused=True)
        found.append([out.loss, out.ranks, *(g for g in grads if g is not None)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    assert found[0][0] > 0


def test_overlaps_are_over_the_whole_vocabulary():
    model = spec_model("eagle3").eval()
    ids = rows(10)[0]["input_ids"]
    batch = Collator(0)([{"input_ids": ids, "labels": [-100, *ids[1:]]}])
    seen, head = [], model.head
    project = head.draft_logits
    head.draft_logits = lambda hidden, *rest: seen.append(project(hidden, *rest)) or seen[-1]
    out = model(**batch)
    p = model.base(batch["input_ids"]).logits[0].softmax(-1)
    drafted = head.target_ids
    assert len(out.overlaps) == 8
    for start in range(8):
        for s in range(3):
            if s >= 7 - start:  # the answer's last token, or after it
                assert out.overlaps[start, s] == 0 and out.ranks[start, s] == ENDED
                continue
            q = torch.zeros(97, dtype=p.dtype)
            q[drafted] = seen[s][start].softmax(-1)
            assert out.overlaps[start, s].item() == pytest.approx(torch.minimum(p[start + 1 + s], q).sum().item())
    assert (out.overlaps < 1).all() and model.train()(**batch).overlaps is None


def test_no_position_asks_for_a_token_of_another_document_or_of_padding():
    documents = torch.tensor([[1, 1, 1, 2, 2, 0]])
    everything = torch.ones(1, 6, dtype=torch.bool)
    asked = DraftTargets.from_batch(torch.arange(10, 16).unsqueeze(0), everything, documents, 2)
    assert asked.positions.tolist() == [0, 1, 3] and asked.tokens.tolist() == [11, 12, 14]
    assert asked.valid.tolist() == [[False, False], [True, False], [False, False]]
    assert asked.left.tolist() == [1, 0, 0, 0, 0, 0] and not asked.counted.any()


def test_position_weights_count_the_tokens_that_depend_on_a_depth():
    chances, floor = torch.tensor([[0.2, 0.9, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64), 0.5
    for row, weights in zip(chances.tolist(), position_weights(chances, floor).tolist(), strict=True):
        q = [(1 - floor) * c + floor for c in row]
        assert weights == pytest.approx([sum(math.prod(q[: m + 1]) for m in range(j, 3)) for j in range(3)])


def test_dpace_weights_each_draft_by_its_own_start(monkeypatch):
    model = spec_model("medusa", dpace=0.5, draft_vocab_size=97).eval()
    ids = rows(9)[0]["input_ids"]
    batch = Collator(0)([{"input_ids": ids, "labels": [-100, *ids[1:]]}])
    head, total = model.head, 0.0
    with torch.no_grad():
        features = model.base(batch["input_ids"], output_hidden_states=True).hidden_states[-1][0]
        log_q = [head.draft_logits(block(features), k).log_softmax(-1) for k, block in enumerate(head.blocks)]
        for start in range(len(ids) - 2):
            log_chances = [log_q[k][start, ids[start + 2 + k]] for k in range(3) if start + 2 + k < len(ids)]
            padded = torch.stack(
                [*(a.exp() for a in log_chances), *[torch.zeros((), dtype=torch.float64)] * (3 - len(log_chances))]
            )
            weights = position_weights(padded.unsqueeze(0), 0.5)[0]
            total += sum(-a * 0.8**k * weights[k] for k, a in enumerate(log_chances))
        assert float(model(**batch).loss) == pytest.approx(float(total) / (len(ids) - 1), rel=1e-10)


@pytest.mark.parametrize(("kind", "options"), [("eagle", {"steps": 2, "metric_steps": 4}), ("eagle3", {}), ("mtp", {})])
def test_dpace_weighs_an_evaluation_as_it_does_training(kind, options):
    model, batch = spec_model(kind, dpace=0.5, **options), Collator(0)(rows(9, 7))
    trained, evaluated = (model.train(mode)(**batch).loss.detach() for mode in (True, False))
    torch.testing.assert_close(trained, evaluated, rtol=1e-12, atol=0)


@pytest.mark.parametrize("text", ["lK", "ce:0", "ce:-1", "ce:x", "ce:nan", "ce,ce:2", "", "ce:inf"])
def test_an_unknown_or_unweighted_loss_is_refused(text):
    with pytest.raises(ValueError, match="loss"):
        parse_loss(text)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(5)
def test_the_teacher_is_the_distribution_of_the_base_and_the_taps_are_its_hidden_states(family):
    base = build(*FAMILIES[family])
    ids, mask = torch.randint(3, 60, (2, 7)), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    positions, layers = torch.arange(7).expand(2, 7) * mask, (1, 2)
    with torch.no_grad():
        features, teacher = tap_base(base, ids, mask, positions, layers)
        out = base(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False,
            output_hidden_states=hidden_state_indices(layers),
        )  # fmt: skip
        seen = mask.bool()
        torch.testing.assert_close(features[seen], concat_taps(out.hidden_states, layers, ids)[seen])
        probs = teacher.probs(torch.arange(14)[seen.flatten()], None)
        torch.testing.assert_close(probs.log_p, out.logits[seen].float().log_softmax(-1), rtol=1e-4, atol=1e-5)
    assert isinstance(teacher, LiveTeacher)


@pytest.mark.parametrize("name", DISTRIBUTION_LOSSES)
def test_a_chunked_loss_takes_an_eighth_of_the_memory_of_the_whole(name):
    """8,192 rows × 131,072 tokens, in the chunks of a GPU; counted on meta tensors."""

    def peak(chunk):
        hidden, weight = (torch.empty(n, 256, device="meta", requires_grad=True) for n in (8192, 131_072))
        theirs, matrix = (torch.empty(n, 256, device="meta") for n in (8192, 131_072))

        def loss_of(here, part):
            log_p = (theirs[here] @ matrix.T).log_softmax(-1)
            return DISTRIBUTION_LOSSES[name]((part @ weight.T).log_softmax(-1), log_p).sum()

        def compute(add, here, part):
            add(loss_of(here, part))
            return ()

        with LiveMemory() as memory:
            loss = loss_of(slice(None), hidden) if chunk is None else chunked_sum(compute, [hidden], [weight], chunk)[0]
            loss.backward()
        return memory.peak

    assert peak(chunked.rows_of_chunk(2 * 131_072, torch.device("cuda"))) * 8 < peak(None)


def test_live_memory_counts_what_is_alive_at_once():
    ones = torch.ones(1000)
    with LiveMemory() as memory:
        kept = ones + 1
        gone = kept * 2
        del gone
        view = kept.view(10, 100)
        other = view.exp()
        assert (memory.live, memory.peak) == (8000, 8000)
        del other
    assert (memory.live, memory.peak) == (4000, 8000)
