"""Losses of the heads equal a slow implementation that shares no code with them, and what they train is what drafts."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_llama

from specheads.convert import convert
from specheads.data import Collator, pack
from specheads.metrics import accepted_length
from specheads.tree import DraftTree

HEADS = {
    "medusa": {"num_heads": 3, "num_layers": 2},
    "eagle": {"metric_steps": 3, "noise": 0.0},
    "eagle3": {"steps": 3, "draft_vocab_size": 40},
}


def spec_model(kind, dtype=torch.float64, **options):
    """A head away from its start, so that no part of it is the identity, on a tiny base."""
    base = tiny_llama().to(dtype)
    model = convert(base, kind, dtype=dtype, **{**HEADS[kind], **options})
    torch.manual_seed(1)
    if kind == "eagle3" and model.head.target_ids is not None:
        model.head.set_draft_vocabulary(torch.randint(0, 100, (97,)), base)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def rows(*lengths, seed=2):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        kept = torch.rand(length, generator=generator) < 0.7
        made.append({"input_ids": ids, "labels": [i if k else -100 for i, k in zip(ids, kept.tolist(), strict=True)]})
        made[-1]["labels"][0] = -100
    return made


# The slow implementation: one row, one position, one step at a time, from the weights alone.


def rms_norm(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turned(x, position, theta=10_000.0):
    """RoPE of one head's vector (d,) as rotations in the planes (j, j + d/2)."""
    d = len(x)
    out = x.clone()
    for j in range(d // 2):
        angle = position * theta ** (-2 * j / d)
        a, b = x[j], x[j + d // 2]
        out[j] = a * math.cos(angle) - b * math.sin(angle)
        out[j + d // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def block_output(w, inputs, residuals, positions, heads=4, shared=2):
    """The output (H,) of the last of a list of rows that attend causally: plain attention over a short sequence."""
    size = len(w["q_proj.weight"]) // heads
    q = w["q_proj.weight"] @ inputs[-1]
    mixed = []
    for h in range(heads):
        kv = h // (heads // shared)
        part = slice(kv * size, (kv + 1) * size)
        query = turned(q[h * size : (h + 1) * size], positions[-1])
        scores, values = [], []
        for x, position in zip(inputs, positions, strict=True):
            scores.append(query @ turned((w["k_proj.weight"] @ x)[part], position) / math.sqrt(size))
            values.append((w["v_proj.weight"] @ x)[part])
        weights = torch.stack(scores).softmax(0)
        mixed.append(sum(a * v for a, v in zip(weights, values, strict=True)))
    hidden = residuals[-1] + w["o_proj.weight"] @ torch.cat(mixed)
    x = rms_norm(hidden, w["post_attention_layernorm.weight"])
    return hidden + w["down_proj.weight"] @ (F.silu(w["gate_proj.weight"] @ x) * (w["up_proj.weight"] @ x))


def block_weights(head):
    return {
        name.removeprefix("blocks.0."): p
        for name, p in head.state_dict(keep_vars=True).items()
        if name.startswith("blocks.0.")
    }


def slow_drafts(model, ids, features, steps, first, following):
    """{(i, s): (hidden, …)}: at each position i the block runs on the true prefix, then on its own outputs.

    first(i): the hidden a true position enters with; following(token, hidden): the block's input and residual.
    """
    w = block_weights(model.head)
    embedded = model.base.get_input_embeddings().weight
    outputs = {}
    for i in range(len(ids) - 1):
        entered = [following(embedded[ids[j + 1]], first(features[j])) for j in range(i + 1)]
        positions = list(range(i + 1))
        for s in range(steps):
            if i + 1 + s >= len(ids):
                break
            if s:
                entered.append(following(embedded[ids[i + 1 + s]], outputs[i, s - 1]))
                positions.append(i + s)
            outputs[i, s] = block_output(w, [x for x, _ in entered], [r for _, r in entered], positions)
    return outputs


def taps(model, ids):
    out = model.base(torch.tensor([ids]), output_hidden_states=True)
    return [torch.cat(parts) for parts in zip(*(out.hidden_states[k][0] for k in model.head.layers), strict=True)], out


def soft_ce(logits, teacher):
    return -(teacher.softmax(0) * logits.log_softmax(0)).sum()


def slow_medusa(model, row):
    ids, labels = row["input_ids"], row["labels"]
    features, out = taps(model, ids)
    w = model.head.state_dict(keep_vars=True)
    total, ranks = 0.0, {}
    for i in range(len(ids)):
        for k in range(3):
            x = features[i]
            for layer in range(2):
                name = f"blocks.{k}.{layer}.linear"
                x = x + F.silu(w[f"{name}.weight"] @ x + w[f"{name}.bias"])
            logits = w[f"lm_heads.{k}.weight"] @ x
            if i + 2 + k < len(ids) and labels[i + 2 + k] != -100:
                total = total - 0.8**k * logits.log_softmax(0)[ids[i + 2 + k]]
                best = out.logits[0, i + 1 + k].argmax()
                ranks[i, k] = int((logits > logits[best]).sum())
    return total, ranks


def slow_eagle(model, row):
    ids, labels = row["input_ids"], row["labels"]
    features, out = taps(model, ids)
    fc, lm_head = model.head.fc.weight, model.base.lm_head.weight

    def following(embedded, hidden):
        x = fc @ torch.cat([embedded, hidden])
        return x, x

    drafts = slow_drafts(model, ids, features, 3, lambda f: f, following)
    total, ranks = 0.0, {}
    for (i, s), predicted in drafts.items():
        if i + 2 + s < len(ids) and labels[i + 2 + s] != -100:
            teacher, logits = out.logits[0, i + 1 + s], lm_head @ predicted
            if s == 0:
                gap = (predicted - features[i + 1]).abs()
                total = total + torch.where(gap < 1, 0.5 * gap * gap, gap - 0.5).mean() + 0.1 * soft_ce(logits, teacher)
            ranks[i, s] = int((logits > logits[teacher.argmax()]).sum())
    return total, ranks


def slow_eagle3(model, row):
    ids, labels = row["input_ids"], row["labels"]
    features, out = taps(model, ids)
    w = model.head.state_dict(keep_vars=True)
    drafted = (torch.arange(40) + w["d2t"]).tolist()

    def following(embedded, hidden):
        normed = rms_norm(embedded, w["input_layernorm.weight"]), rms_norm(hidden, w["hidden_norm.weight"])
        return torch.cat(normed), hidden

    drafts = slow_drafts(model, ids, features, 3, lambda f: model.head.fc.weight @ f, following)
    total, ranks = 0.0, {}
    for (i, s), hidden in drafts.items():
        if i + 2 + s < len(ids) and labels[i + 2 + s] != -100:
            teacher = out.logits[0, i + 1 + s]
            logits = model.head.lm_head.weight @ rms_norm(hidden, model.head.norm.weight)
            best = int(teacher.argmax())
            if best in drafted:
                total = total + 0.8**s * soft_ce(logits, teacher[drafted])
                ranks[i, s] = int((logits > logits[drafted.index(best)]).sum())
            else:
                ranks[i, s] = -1
    return total, ranks


SLOW = {"medusa": slow_medusa, "eagle": slow_eagle, "eagle3": slow_eagle3}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("training", [True, False])
def test_loss_and_gradients_equal_the_slow_implementation(kind, training):
    model = spec_model(kind).train(training)
    data = rows(9, 7)
    batch = Collator(0)(data)
    loss = model(**batch).loss
    grads = torch.autograd.grad(loss, list(model.head.parameters()), allow_unused=True)
    tokens = sum(label != -100 for row in data for label in row["labels"])
    slow = sum(SLOW[kind](model, row)[0] for row in data) / tokens
    slow_grads = torch.autograd.grad(slow, list(model.head.parameters()), allow_unused=True)
    # Softmax and RoPE run in float32 whatever the dtype, hence no tighter.
    assert loss.item() == pytest.approx(slow.item(), rel=1e-6)
    for (name, _), fast, expected in zip(model.head.named_parameters(), grads, slow_grads, strict=True):
        assert expected is not None, name
        torch.testing.assert_close(fast, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", HEADS)
def test_accepted_length_of_a_head_equals_brute_force(kind):
    model = spec_model(kind).eval()
    data = rows(10, 8)
    for row in data:
        row["labels"] = [-100, *row["input_ids"][1:]]
    with torch.no_grad():
        ranks = model(**Collator(0)(data)).ranks
        lengths, seen = [], []
        for row in data:
            slow = SLOW[kind](model, row)[1]
            for i in range(len(row["input_ids"]) - 4):  # where all three depths have a target
                run = [slow[i, s] for s in range(3)]
                seen.append(run)
                lengths.append(1 + next((s for s, rank in enumerate(run) if rank != 0), 3))
    assert ranks.tolist() == seen
    assert accepted_length(ranks) == pytest.approx(sum(lengths) / len(lengths))


class Forced:
    """A plan that drafts a known text as chains, and keeps what the head said after each token of it."""

    def __init__(self, text, first, depth):
        self.text, self.at, self.depth, self.seen = text, first, depth, []
        self.num_nodes, self.drafting_slots = depth + 1, depth

    def grow(self, root, expand, sampler, vocab_size):
        assert root.tolist() == [self.text[self.at]]
        drafted = self.text[self.at + 1 : self.at + 1 + self.depth]
        level, parents = root.unsqueeze(1), None
        for s in range(self.depth):
            self.seen.append((self.at - 1, s, expand(level, parents).logits[0, 0]))
            level, parents = torch.tensor([[drafted[s]]]), torch.zeros(1, 1, dtype=torch.long)
        self.at += self.depth + 1
        tokens = torch.tensor([[*root.tolist(), *drafted]])
        return DraftTree(tokens, torch.arange(-1, self.depth).unsqueeze(0), self.depth)


@pytest.mark.parametrize("kind", HEADS)
def test_training_unroll_gives_the_logits_of_decoding(kind):
    model = spec_model(kind).eval()
    depth, prompt = 3, rows(6)[0]["input_ids"]
    text = model.base.generate(torch.tensor([prompt]), max_new_tokens=17, do_sample=False, eos_token_id=None)[
        0
    ].tolist()
    plan = Forced(text, len(prompt), depth)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, tree=plan)
    assert out[0].tolist() == text[: len(prompt) + 12]
    assert len(plan.seen) >= 3 * depth  # rounds on a fresh cache and on a filled one
    trained = training_logits(model, text, depth)
    for i, s, logits in plan.seen:
        torch.testing.assert_close(logits, trained[s][i], rtol=1e-6, atol=1e-6)


def training_logits(model, text, depth):
    """[(T, V)] per depth: what the loss compares with the teacher, read through TapBatch."""
    seen = []
    head = model.head
    if model.head.config.kind == "medusa":
        with torch.no_grad():
            features = torch.stack(taps(model, text)[0])
        return [logits.detach() for logits in head(features)]
    unroll = head.unroll

    def spy(batch, steps, features=None):
        outputs = unroll(batch, steps, features)
        seen.extend(head.draft_logits(out[0], batch.lm_head).detach() for out in outputs[:depth])
        return outputs

    head.unroll = spy
    try:
        model(torch.tensor([text]), loss_mask=torch.ones(1, len(text)))
    finally:
        del head.unroll
    return seen


@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_mask_is_indexed_by_the_predicted_token(kind):
    # With every token in the draft vocabulary, since others are not learnt.
    model = spec_model(kind, **({"draft_vocab_size": 97} if kind == "eagle3" else {})).eval()
    ids = torch.tensor([rows(9)[0]["input_ids"]])

    def loss_of(token):
        return float(model(ids, loss_mask=torch.arange(9).unsqueeze(0) == token).loss)

    # Tokens 0 and 1 are never drafted (1 is the base's own first), 2 is what position 0 drafts.
    assert loss_of(0) == loss_of(1) == 0
    assert loss_of(2) > 0 and loss_of(8) > 0


@pytest.mark.parametrize("kind", HEADS)
def test_packed_documents_give_the_loss_of_separate_ones(kind):
    model = spec_model(kind).eval()
    data = rows(8, 5, 9)
    packed = pack(data, 22)
    assert len(packed) == 1
    apart, together = model(**Collator(0)(data)), model(**Collator(0)(packed))
    assert float(together.loss.detach()) == pytest.approx(float(apart.loss.detach()), rel=1e-10)
    assert sorted(together.ranks.tolist()) == sorted(apart.ranks.tolist())
    # And it is the document ids that keep them apart.
    row = {**packed[0], "document_ids": [1] * 22, "position_ids": list(range(22))}
    assert abs(float(model(**Collator(0)([row])).loss - apart.loss)) > 1e-3


def test_targets_outside_the_draft_vocabulary_are_not_learnt_and_count_as_misses():
    model = spec_model("eagle3").eval()
    batch = Collator(0)([{"input_ids": (ids := rows(12)[0]["input_ids"]), "labels": [-100, *ids[1:]]}])
    teacher = model.base(batch["input_ids"]).logits[0].argmax(-1)
    outside = ~model.head.t2d[teacher]
    assert outside[1:-1].any() and not outside[1:-1].all()
    out = model(**batch)
    first = [out.ranks[i, 0] == -1 for i in range(len(out.ranks))]
    assert first == outside[1 : 1 + len(first)].tolist()
    # A vocabulary without any of the base's tokens leaves nothing to learn.
    counts = torch.ones(97)
    counts[teacher] = 0
    model.head.set_draft_vocabulary(counts)
    none = model(**batch)
    assert float(none.loss.detach()) == 0 and (none.ranks == -1).all()
    assert accepted_length(none.ranks) == 1.0


def test_feature_noise_is_added_in_training_only():
    model = spec_model("eagle", noise=0.5)
    batch = Collator(0)(rows(9))
    quiet = spec_model("eagle")
    assert float(model.eval()(**batch).loss.detach()) == float(quiet.eval()(**batch).loss.detach())
    assert float(model.train()(**batch).loss.detach()) != float(quiet.train()(**batch).loss.detach())


@pytest.mark.parametrize("kind", HEADS)
def test_the_base_stays_frozen_and_in_evaluation_mode(kind):
    model = spec_model(kind)
    for mode in (True, False):
        model.train(mode)
        assert model.head.training is mode
        assert not any(module.training for module in model.base.modules())
    model.train()(**Collator(0)(rows(9))).loss.backward()
    assert all(p.grad is None and not p.requires_grad for p in model.base.parameters())
    assert all(p.grad is not None for p in model.head.parameters())


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_learns_to_draft(kind):
    """On what the base itself writes, which is where drafts come from."""
    base = tiny_llama(num_hidden_layers=2)
    torch.manual_seed(0)
    prompts = torch.randint(3, 97, (8, 4))
    texts = base.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=28, do_sample=False)
    model = convert(base, kind, **{**HEADS[kind], **({"draft_vocab_size": 97} if kind == "eagle3" else {})})
    batch = {"input_ids": texts, "loss_mask": torch.ones_like(texts)}
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    before = accepted_length(model.eval()(**batch).ranks)
    model.train()
    for _ in range(100):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    after = accepted_length(model.eval()(**batch).ranks)
    assert before < 1.3 and after > 1.6
