"""What training says a head is worth is what decoding makes of it, and a head that is served otherwise is found out."""

import json
import logging
from functools import partial

import pytest
import torch

from specheads.data.images import TYPES
from specheads.data.rows import chunk
from specheads.decoding.planner import chain
from specheads.decoding.results import counts_by_range
from specheads.models.convert import convert
from specheads.training import parity as parity_module
from specheads.training import run as training
from specheads.training.parity import Parity, ParityConfig, ParityError, compare, prompts_of
from specheads.training.recipe.recipe import RecipeError, read_recipe
from specheads.training.report.curves import series
from tests.reference.slow_heads import KINDS
from tests.support.chat_tokenizer import build_tokenizer
from tests.support.families import build
from tests.support.learnt_heads import PROMPTS, learnt
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_llama
from tests.support.training_runs import forked, overrides
from train import heads


def rows(*prompts):
    return [{"input_ids": prompt} for prompt in prompts]


ROWS = rows(*PROMPTS)


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KINDS), ("parallel", {"sample_from_anchor": False, "block_size": 4})]
)
@pytest.mark.sampled(4)
def test_decoding_accepts_what_training_says_and_a_head_that_drafts_otherwise_fails(kind, options):
    model, config = learnt(kind, **options), ParityConfig(max_new_tokens=40)
    parity = compare(model, ROWS, config)
    assert parity.measured == parity.simulated > 1.15, parity
    assert parity.holds and model.training
    parity.refuse()
    # A serving fault as they happen: the features of another layer.
    propose = model.head.propose
    model.head.propose = lambda context, *rest: propose(
        type(context)(**{**{n: getattr(context, n) for n in context.__slots__}, "features": -context.features}), *rest
    )
    worse = compare(model, ROWS, config)
    assert worse.measured < worse.simulated and not worse.holds
    with pytest.raises(ParityError, match=f"{worse.measured:.3f} in decoding, {worse.simulated:.3f} by training"):
        worse.refuse()


def test_a_base_with_a_penalty_of_its_own_is_decoded_without_it():
    model = learnt("medusa")
    model.base.generation_config.repetition_penalty = 1.8
    parity = compare(model, ROWS, ParityConfig(max_new_tokens=40))
    assert parity.measured == parity.simulated > 1.15
    assert model.base.generation_config.repetition_penalty == 1.8


def test_what_the_tree_to_be_served_accepts_is_told_too():
    model, config = learnt("medusa"), ParityConfig(max_new_tokens=40)
    model.set_default_tree(chain(model.head.scored_depths).choices)
    one = compare(model, ROWS, config)
    assert one.served == one.measured
    model.set_default_tree(((0,), (1,)))
    short = compare(model, ROWS, config)
    assert short.measured == one.measured > 2 >= short.served > 1.5
    assert short.metrics["parity_served"] == short.served and f"; {short.served:.3f} with the tree" in str(short)


def test_the_accepted_length_by_output_position_is_that_of_the_steps_that_begin_there(monkeypatch):
    """Counted by hand from the right tokens of each draft on the text that transformers writes."""
    model, starts = learnt("medusa"), (0, 8, 20)
    prompts = [*PROMPTS, [70, 71, 72], [20, 21]]  # it has not learnt the last ones
    monkeypatch.setattr(parity_module, "counts_by_range", partial(counts_by_range, starts=starts))
    found = compare(model, rows(*prompts), ParityConfig(max_new_tokens=40))
    gained = {start: [] for start in starts}
    for prompt in prompts:
        text = model.base.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        labels = text.clone()
        labels[:, : len(prompt)] = -100
        with torch.no_grad():
            ranks = model.eval()(text, labels=labels).ranks.tolist()
        at = 1  # the pass over the prompt gives the first token
        while at <= len(ranks):
            right = next((depth for depth, rank in enumerate(ranks[at - 1]) if rank != 0), len(ranks[at - 1]))
            gained[max(start for start in starts if start <= at)].append(1 + right)
            at += 1 + right
    expected = {start: sum(gains) / len(gains) for start, gains in gained.items()}
    assert len(set(expected.values())) == 3
    assert found.by_range == pytest.approx(expected)
    assert found.metrics.items() >= {f"parity_measured_from_{s}": found.by_range[s] for s in starts}.items()
    told = Parity(1.5, 1.5, 1.5, 9, 0.02, {0: 1.75, 4096: 1.25}).rows()
    assert told[3:] == [["real decoding, at positions 0–1k", "1.750"], ["real decoding, at positions 4–16k", "1.250"]]


def test_no_prompt_is_begun_after_the_time_it_may_take_and_progress_has_the_time_left():
    model, config, shown = learnt("medusa"), ParityConfig(max_new_tokens=12), []
    assert len(PROMPTS) > 1
    bounded = compare(model, ROWS, config, lambda share, note: shown.append((share, note)), 0.0)
    assert bounded.steps == compare(model, ROWS[:1], config).steps and shown == [(1.0, "1 prompts, 0:00 left")]
    shown.clear()
    compare(model, ROWS, config, lambda share, note: shown.append((share, note)))
    assert [share for share, _ in shown] == [(i + 1) / len(PROMPTS) for i in range(len(PROMPTS))]


def test_prompts_are_what_comes_before_the_first_supervised_token(caplog):
    chat = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, 4, 5]}
    text = {"input_ids": list(range(50)), "labels": [-100, *range(1, 50)]}
    packed = {
        "input_ids": [1, 2, 3, 9, 9], "labels": [-100, -100, 3, -100, 9], "document_ids": [1, 1, 1, 2, 2],
    }  # fmt: skip
    config = ParityConfig(prompts=3, prompt_tokens=4)
    assert prompts_of([chat, text, chat, packed], config) == rows([1, 2, 3], [0, 1, 2, 3], [1, 2, 3])
    assert prompts_of([packed], config) == rows([1, 2, 3])
    later = chat | {"images": ["a"], TYPES: [0, 0, 0, 0, 1]}
    assert prompts_of([later, chat], config) == rows([1, 2, 3])
    assert "left out because of images after the beginning of their first answer: 1" in caplog.text


def test_a_later_part_of_a_long_text_that_begins_with_a_bos_of_its_own_is_plain_text():
    config = ParityConfig(prompts=2, prompt_tokens=4)
    tokenizer = build_tokenizer()
    row = {"input_ids": [tokenizer.bos_token_id, *range(5, 25)], "labels": [-100, *range(5, 25)]}
    parts = chunk(row, 11, tokenizer)
    assert parts[1]["labels"][:2] == [-100, -100] and [len(one["input_ids"]) for one in prompts_of(parts, config)] == [
        4,
        4,
    ]


def test_a_text_shorter_than_a_draft_is_compared_to_its_end_and_a_single_token_gives_nothing():
    model = convert(tiny_llama(), "medusa", num_heads=7)
    asked = {"max_new_tokens": 3, "do_sample": False}
    first, _, last = model.generate(torch.tensor([[5, 6]]), tree=chain(7), **asked)[0, 2:].tolist()
    for ends, steps in ((None, 7), (last, 2)):
        model.generation_config.eos_token_id = ends
        parity = compare(model, rows([5, 6]), ParityConfig(max_new_tokens=8))
        assert parity.holds and parity.steps <= steps
    model.generation_config.eos_token_id = first
    assert compare(model, rows([5, 6]), ParityConfig(max_new_tokens=8)) is None
    assert compare(model, [], ParityConfig()) is None


@pytest.mark.parametrize("length", [40, 12])
def test_a_prompt_too_long_for_the_bases_positions_is_cut(length):
    model = convert(build("GPT2Config", {"n_positions": length, "max_position_embeddings": length}), "medusa")
    model.generation_config.eos_token_id = None
    parity = compare(model, rows(list(range(5, 65)), list(range(5, 40))), ParityConfig(max_new_tokens=24))
    assert parity is not None and parity.steps > 1 and parity.holds


@pytest.mark.draws
def test_a_run_ends_with_the_comparison_and_fails_loudly_with_the_head_saved(material, tmp_path, monkeypatch, capsys):
    recipe = str(ROOT / "recipes" / "eagle3.yaml")
    options = overrides(material, tmp_path / "good", 4, "parity.prompts=2", "parity.max_new_tokens=12")
    assert heads.main([recipe, *options]) == 0
    results = json.loads((tmp_path / "good" / "results.json").read_text())
    assert results["parity_measured"] == results["parity_simulated"] >= 1 <= results["parity_served"]
    assert (tmp_path / "good" / "curves.png").read_bytes().startswith(b"\x89PNG")
    history = json.loads((tmp_path / "good" / "trainer_state.json").read_text())["log_history"]
    assert {name: len(found) for name, found in series(history).items()} == {
        "loss": 2, "accepted length": 3, "accuracy by depth": 4,
    }  # fmt: skip
    monkeypatch.setattr(training, "compare", lambda *_: Parity(1.1, 2.2, 1.5, 30, 0.02))
    options = overrides(material, tmp_path / "bad", 4)
    assert heads.main([recipe, *options]) == 3
    assert "1.100 in decoding, 2.200 by training" in capsys.readouterr().err
    assert (tmp_path / "bad" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "bad" / "results.json").read_text())["parity_measured"] == 1.1


def test_of_two_processes_one_says_that_decoding_differs_and_both_exit_with_3(material, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(training, "compare", lambda *_: Parity(1.1, 2.2, 1.5, 30, 0.02))
    log = logging.FileHandler(tmp_path / "log")  # pytest's own handlers stay silent in a fork
    logging.getLogger(training.__name__).addHandler(log)
    options = overrides(material, tmp_path / "two", 1, "launch.processes=2", "training.max_steps=1")

    def run():
        assert heads.main([str(ROOT / "recipes" / "eagle3.yaml"), *options]) == 3
        # A launcher stops the other process as soon as one has failed, so by then all is told and written.
        assert "in decoding, 2.200 by training" in (tmp_path / "log").read_text()
        assert "parity_measured" in (tmp_path / "two" / "results.json").read_text()

    try:
        forked(2, run)
    finally:
        logging.getLogger(training.__name__).removeHandler(log)
    assert (tmp_path / "log").read_text().count("parity: accepted length 1.100 in decoding") == 1
    assert capfd.readouterr().err.count("train/heads.py: accepted length 1.100 in decoding, 2.200 by training") == 1


@pytest.mark.parametrize("option", ["parity.prompts=-1", "parity.tolerance=2", "parity.prompt=3", "parity.prompts=x"])
def test_a_wrong_parity_option_is_refused(option, tmp_path):
    with pytest.raises(RecipeError, match=r"parity\.(prompts|tolerance)"):
        read_recipe(ROOT / "recipes" / "eagle3.yaml", [f"training.output_dir={tmp_path}", option])
