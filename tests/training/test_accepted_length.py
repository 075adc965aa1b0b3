"""The accepted length of training and evaluation is what decoding counts, up to the last token of each answer."""

import datasets
import pytest
import torch

from specheads.data.batches import Collator, pack
from specheads.decoding.planner import StaticTree, chain
from specheads.losses.metrics import AcceptanceMeter
from tests.reference.slow_heads import KINDS
from tests.support.learnt_heads import PROMPTS, learnt
from tests.support.trainers import model_of, trainer_of

TREE = StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
HEADS = [*((kind, {}) for kind in KINDS), ("parallel", {"sample_from_anchor": False, "block_size": 4})]


def gains(model, text, start, end, plan):
    """Tokens of the first step that drafts, when decoding goes on after text[:start]."""
    model.generation_config.eos_token_id = text[-1] if end == "eos" else None
    asked = {"max_new_tokens": 60 if end == "eos" else len(text) - start, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([text[:start]]), tree=plan, do_sample=False, **asked)
    assert out.sequences[0].tolist() == text
    return len(out.steps[1].tokens[0])


def answers(model, most):
    """Prompts with the base's own answers, each ended by a token that it does not hold before."""
    for prompt in PROMPTS:
        whole = model.base.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False)[0].tolist()
        for end in range(len(prompt) + 2, len(whole) + 1):
            if whole[end - 1] not in whole[: end - 1]:
                yield prompt, whole[:end]


@pytest.mark.parametrize("end", ["eos", "limit"])
@pytest.mark.parametrize(("kind", "options"), HEADS)
@pytest.mark.sampled(4)
def test_it_is_the_mean_gain_of_decoding_from_every_token_of_every_answer(kind, options, end):
    model = learnt(kind, **options).eval()
    model.generation_config.eos_token_id = None
    depths, rows, chains, trees = model.head.scored_depths, [], [], []
    for prompt, text in answers(model, 7):
        rows.append({"input_ids": text, "labels": [-100] * len(prompt) + text[len(prompt) :]})
        for start in range(len(prompt), len(text) - 1):
            chains.append(gains(model, text, start, end, chain(depths)))
            trees.append(gains(model, text, start, end, TREE))
    assert len(rows) > 5 and max(chains) > 2 and min(len(row["labels"]) for row in rows) < 2 + depths
    for batch in (rows, pack(rows, 40)):
        with torch.no_grad():
            out = model(**Collator(0)(batch))
        meter = AcceptanceMeter(TREE)
        meter.add(out.ranks, out.overlaps)
        found = meter.compute()
        assert len(out.ranks) == len(chains)
        assert found["accepted_length"] == pytest.approx(sum(chains) / len(chains))
        assert found["accepted_length_tree"] == pytest.approx(sum(trees) / len(trees))


def held_out(*lengths):
    """Rows with answers of so many tokens."""
    return datasets.Dataset.from_list(
        [{"input_ids": [9, 8, *range(3, 3 + n)], "labels": [-100, -100, *range(3, 3 + n)]} for n in lengths]
    )


def choosing(folder, metric, evaluation, **options):
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": metric}
    return trainer_of(folder, model_of("medusa"), evaluation, **{**saving, **best, **options})


@pytest.mark.parametrize(
    ("metric", "longest"),
    [("accepted_length", 2), ("eval_accepted_length_sampled", 2), ("accuracy_depth_1", 3), ("acceptance_depth_2", 4),
     ("accepted_length_error", 2)],
)  # fmt: skip
def test_a_metric_is_refused_before_training_if_and_only_if_no_answer_is_long_enough(metric, longest, tmp_path):
    batch = {"per_device_eval_batch_size": 2}
    choosing(tmp_path / "long", metric, held_out(longest, 1, longest), **batch).train()
    refused = choosing(tmp_path / "short", metric, held_out(longest - 1, 1, 1), **batch)
    with pytest.raises(
        ValueError, match=f"metric_for_best_model={metric}: .* longest held-out answer has {longest - 1}"
    ):
        refused.train()
    assert refused.state.global_step == 0 and not list((tmp_path / "short").glob("checkpoint-*"))


def test_a_metric_that_the_head_the_batches_or_the_sets_cannot_give_is_refused_too(tmp_path):
    for metric in ("accuracy_depth_3", "loss_depth_3"):  # of a head with two depths
        with pytest.raises(ValueError, match=r"would not have it, only loss, loss_depth_1, loss_depth_2, accepted"):
            choosing(tmp_path, metric, held_out(9)).train()
    with pytest.raises(ValueError, match="accepted_length_error"):  # of one batch
        choosing(tmp_path, "accepted_length_error", held_out(9, 9), per_device_eval_batch_size=2).train()
    sets = {"long": held_out(9), "short": held_out(1)}
    choosing(tmp_path, "long_accepted_length", sets).train()
    with pytest.raises(ValueError, match="short_accepted_length"):
        choosing(tmp_path, "short_accepted_length", sets).train()
