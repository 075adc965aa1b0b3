"""Losses and ranks of the heads equal a slow implementation that shares no code with them, packed or not."""

import pytest
import torch

from specheads.data.datasets import Collator, pack
from specheads.losses.metrics import accepted_length
from specheads.losses.targets import ENDED
from tests.reference.slow_heads import FORMS, KINDS, LATENT, SLOW, WINDOWED, rows
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.families import FAMILIES, build

PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
# What their losses are compared on.
HEADS = [
    ("medusa", {}),
    ("medusa", {"draft_vocab_size": 40}),
    ("hydra", {}),
    ("hydra", {"prefix_layer": True, "draft_vocab_size": 40}),
    ("eagle", {}),
    ("eagle", {"steps": 3}),
    ("eagle", {"steps": 2, "num_layers": 2}),
    ("eagle3", {}),
    ("eagle3", {"norm_features": True, "norm_output": True}),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": False, "num_layers": 2}),
    ("eagle3", {"qk_norm": True, "hidden_act": "gelu", "own_embeddings": True}),
    ("eagle3", {"num_layers": 2, **LATENT}),
    ("eagle3", {"mask_token_id": 5, "num_layers": 2, "norm_features": True}),
    ("eagle3", {"mask_token_id": 5, "own_embeddings": True, "sliding_window": 3}),
    ("eagle", {"qk_norm": True, "num_layers": 2, "hidden_act": "gelu_pytorch_tanh", "rope_parameters": PARTIAL}),
    ("mtp", {}),
    ("mtp", {"num_modules": 3}),
    ("mtp", {"num_modules": 2, "hidden_first": True, "norm_output": False}),
    ("mtp", {"fc_bias": True, "zero_first_embedding": True}),
    ("mtp", {"final_norm": False}),
    ("parallel", {}),
    ("parallel", {"causal": False, "markov_rank": 0, "num_layers": 1, "mask_token_id": 5}),
    ("parallel", {"confidence": True, "draft_vocab_size": 40}),
    ("parallel", {"sample_from_anchor": False, "block_size": 4, "causal": False, "mask_token_id": 5, "markov_rank": 0}),
    ("parallel", {"sample_from_anchor": False, "block_size": 4, "confidence": True}),
    *WINDOWED,
    *(("parallel", options) for options in FORMS.values()),
]


def test_over_large_features_eagle3s_block_is_heard_only_with_norm_before_residual():
    batch = Collator(0)(rows(9, 7))
    for normed in (True, False):
        model = spec_model("eagle3", norm_before_residual=normed, steps=1).eval().requires_grad_(False)
        usual = model(**batch).loss.item()
        model.head.fc.weight.mul_(1000)  # as of a base whose residual stream is so much larger
        large = model(**batch).loss.item()
        for block in model.head.blocks:
            block.o_proj.weight.zero_()
            block.down_proj.weight.zero_()
        silent = model(**batch).loss.item()
        if normed:
            assert large == pytest.approx(usual, rel=1e-6) and abs(large - silent) > 0.02
        else:
            assert large == pytest.approx(silent, abs=1e-4) and abs(large - usual) > 5e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "options"), HEADS)
@pytest.mark.parametrize("training", [True, False])
def test_loss_and_gradients_equal_the_slow_implementation(kind, options, training):
    model = spec_model(kind, **options).train(training)
    model.progress = 0.3  # of which only training takes notice
    data = rows(12, 6)  # which have labels for each step of a draft, unlike rows(8, 6)
    batch = Collator(0)(data)
    loss = model(**batch).loss
    trained = [p for p in model.head.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, trained, allow_unused=True)
    tokens = sum(label != -100 for row in data for label in row["labels"])
    slow = sum(SLOW[kind](model, row)[0] for row in data) / tokens
    slow_grads = torch.autograd.grad(slow, trained, allow_unused=True)
    # Softmax and RoPE run in float32 whatever the dtype, hence no tighter.
    assert loss.item() == pytest.approx(slow.item(), rel=1e-6)
    names = [name for name, p in model.head.named_parameters() if p.requires_grad]
    for name, fast, expected in zip(names, grads, slow_grads, strict=True):
        assert expected is not None, name
        atol = 1e-5 * max(1.0, float(expected.abs().max()))  # without a final norm, gradients are large
        torch.testing.assert_close(fast, expected, rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("kind", "options"), HEADS)
def test_accepted_length_of_a_head_equals_brute_force(kind, options):
    model = spec_model(kind, **options).eval()
    data = rows(7, 6)
    for row in data:
        row["labels"] = [-100, *row["input_ids"][1:]]
    with torch.no_grad():
        ranks = model(**Collator(0)(data)).ranks
        lengths, seen = [], []
        for row in data:
            slow = SLOW[kind](model, row)[1]
            for i in range(len(row["input_ids"]) - 2):
                left = len(row["input_ids"]) - 2 - i  # tokens after the one that is drafted from
                run = [slow[i, s] if s < left - 1 else ENDED for s in range(3)]
                seen.append(run)
                lengths.append(min(left, 1 + next((s for s, rank in enumerate(run) if rank != 0), 3)))
    assert ranks.tolist() == seen
    assert accepted_length(ranks) == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_mask_is_indexed_by_the_predicted_token(kind):
    # With every token in the draft vocabulary, since others are not learned.
    model = spec_model(kind, **({"draft_vocab_size": 97} if kind == "eagle3" else {})).eval()
    ids = torch.tensor([rows(9)[0]["input_ids"]])

    def loss_of(token):
        return float(model(ids, loss_mask=torch.arange(9).unsqueeze(0) == token).loss.detach())

    # Tokens 0 and 1 are never drafted (1 is the base's own first), 2 is what position 0 drafts.
    assert loss_of(0) == loss_of(1) == 0
    assert loss_of(2) > 0 and loss_of(8) > 0


@pytest.mark.parametrize(
    ("kind", "family", "options"),
    # Each way of reaching back: to the start, to a window, and by layer to the start, a window or a chunk.
    [
        *((kind, "Llama", {"prefix_layer": True} if kind == "hydra" else {}) for kind in KINDS),
        ("mtp", "Ministral", {}), ("mtp", "DeepSeek-V3", {}),
        ("medusa", "Mistral", {}), ("medusa", "Gemma-2", {}), ("medusa", "Llama-4", {}),
        *((kind, "Llama", options) for kind, options in WINDOWED),
    ],
)  # fmt: skip
def test_packed_documents_give_the_loss_of_separate_ones(kind, family, options):
    model = spec_model(kind, build(*FAMILIES[family]), **options).eval()
    data = rows(14, 5, 19)  # the longer ones reach past a window or chunk of 8
    packed = pack(data, 38)
    assert len(packed) == 1
    apart, together = model(**Collator(0)(data)), model(**Collator(0)(packed))
    assert float(together.loss.detach()) == pytest.approx(float(apart.loss.detach()), rel=1e-5)
    assert sorted(together.ranks.tolist()) == sorted(apart.ranks.tolist())
    # And it is the document ids that keep them apart.
    row = {**packed[0], "document_ids": [1] * 38, "position_ids": list(range(38))}
    mixed = model(**Collator(0)([row])).terms
    assert max(abs(float(mixed[name] - term)) for name, term in apart.terms.items()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_shorter_than_what_is_unrolled_gives_the_loss_it_can(kind):
    options = {
        "medusa": {"num_heads": 7}, "hydra": {"num_heads": 7, "prefix_layer": True}, "eagle": {"metric_steps": 7},
        "eagle3": {"draft_vocab_size": 97, "steps": 7}, "mtp": {"steps": 7, "num_modules": 2},
        "parallel": {"block_size": 7},
    }  # fmt: skip
    model = spec_model(kind, **options[kind]).eval()
    for length in (1, 2, 3, 5):
        data = rows(length)
        data[0]["labels"] = [-100, *data[0]["input_ids"][1:]]
        # The same row beside a longer one with nothing to learn, which pads it.
        blank = {**(longer := rows(12)[0]), "labels": [-100] * len(longer["labels"])}
        alone, padded = (float(model(**Collator(0)(batch)).loss.detach()) for batch in (data, [*data, blank]))
        assert alone == pytest.approx(padded, rel=1e-6) and (alone > 0) == (length > 2)


def test_targets_outside_the_draft_vocabulary_are_not_learnt_and_count_as_misses():
    model = spec_model("eagle3").eval()
    batch = Collator(0)([{"input_ids": (ids := rows(12)[0]["input_ids"]), "labels": [-100, *ids[1:]]}])
    teacher = model.base(batch["input_ids"]).logits[0].argmax(-1)
    outside = ~model.head.t2d[teacher]
    assert outside[1:-1].any() and not outside[1:-1].all()
    out = model(**batch)
    first = [out.ranks[i, 0] == -1 for i in range(9)]
    assert first == outside[1:10].tolist() and len(out.ranks) == 10 and (out.ranks[9] == ENDED).all()
    # A vocabulary without any of the base's tokens leaves nothing to learn.
    counts = torch.ones(97)
    counts[teacher] = 0
    model.head.set_draft_vocabulary(counts)
    none = model(**batch)
    assert float(none.loss.detach()) == 0 and (none.ranks < 0).all()
    assert accepted_length(none.ranks) == 1.0
    # Nor does one without any of the text's, where that is what is learnt.
    hard = spec_model("eagle3", loss="hard").eval()
    hard.head.set_draft_vocabulary(torch.ones(97).index_fill(0, torch.tensor(ids), 0))
    assert float(hard(**batch).loss.detach()) == 0


def test_feature_noise_is_added_in_training_only():
    model = spec_model("eagle", noise=0.5)
    batch = Collator(0)(rows(9))
    quiet = spec_model("eagle")
    assert float(model.eval()(**batch).loss.detach()) == float(quiet.eval()(**batch).loss.detach())
    assert float(model.train()(**batch).loss.detach()) != float(quiet.train()(**batch).loss.detach())
