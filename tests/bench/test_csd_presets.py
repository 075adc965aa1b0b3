"""CS Drafting's presets: each recipe on tiny models, and MMLU and GSM8K asked of a T5 that knows answers."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from specheads import Cascade, DraftModel, MaxGram, generate
from specheads.bench.compare.decoder_texts import parse_decoder
from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.tasks import load_task
from specheads.decoding.drafters.maxgram import load_bigrams, save_bigrams
from specheads.models.base.loading import load_language_model
from tests.support import t5_on_disk, trained_t5
from tests.support.command_line import run
from tests.support.paths import ROOT

RECIPES = ROOT / "recipes"
# K-matrix, leniency and costs as published.
PRESETS = {
    "t5_size": ([[5, 14, 10], [0, 1, 10], [0, 0, 10]], 2, "model_parameters"),
    "t5_work": ([[5, 8, 10], [0, 1, 10], [0, 0, 10]], 5, "previous_work"),
    "llama": ([[13, 10], [0, 10]], 3, "model_parameters"),
}
MMLU = {"input": "Two plus two?", "A": "3", "B": "4", "C": "5", "D": "6", "target": "B"}
PROMPT = "Question: Two plus two?\n(A) 3 (B) 4 (C) 5 (D) 6\n Answer: \n Let's think step by step. "


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A T5 that was taught, in folder/large, one that learnt less, in folder/small, and rows that neither saw."""
    folder = tmp_path_factory.mktemp("taught")
    loss, choices, totals = trained_t5.teach(folder)
    assert loss < 0.2
    (folder / "mmlu.json").write_text(json.dumps(choices), "utf8")
    (folder / "gsm8k.json").write_text(json.dumps({"train": [], "test": totals}), "utf8")
    return folder


def test_recipes_hold_the_published_numbers():
    for name, (matrix, leniency, cost) in PRESETS.items():
        options = BenchOptions.read({"recipe": RECIPES / f"bench_csd_{name}.yaml"})
        cascade = parse_decoder(*options.decoder)
        assert (json.loads(cascade.k_matrix), cascade.leniency, options.cost) == (matrix, leniency, cost)
        assert options.task == ("mmlu",) and options.batch == (1,) and options.temperature == (0.0,)
        assert cascade.drafter.endswith("+maxgram") and cascade.drafter.count("model:") == len(matrix) - 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_recipe_runs_on_other_models_that_options_name(name, shipped, tmp_path, cache_in_tmp, capsys):
    rows = tmp_path / "mmlu.jsonl"
    rows.write_text(json.dumps(MMLU) + "\n", "utf8")
    if name == "llama":
        base, drafts = shipped / "base", [shipped / "base"]
    else:
        base, drafts = (t5_on_disk.save(t5_on_disk.t5(seed), tmp_path / f"t5-{seed}") for seed in (1, 2))
        drafts = [drafts, drafts]
    size = len(t5_on_disk.byte_tokenizer())
    save_bigrams([(token + 1) % size for token in range(size)], tmp_path / "bigrams.json")
    parts = "+".join(f"model:{draft}" for draft in drafts)
    matrix, leniency, _ = PRESETS[name]
    text = f"cascade:{parts}+maxgram:{tmp_path / 'bigrams.json'} k={json.dumps(matrix, separators=(',', ':'))}"
    words = (
        base, "--recipe", RECIPES / f"bench_csd_{name}.yaml", "-d", f"{text} leniency={leniency}", "--cost", "measured",
        "--task", f"mmlu:{rows}", "--max-new-tokens", 6, "--repeats", 1, "--no-plots", "--out", tmp_path / "out",
    )  # fmt: skip
    code, out, err = run(capsys, "bench", *words, "--json")
    assert code == 0, err
    plain, cascade = json.loads(out)["rows"]
    assert cascade["tokens"] == plain["tokens"] and cascade["same_text"] == cascade["texts"] == 1
    assert cascade["swi"] > 0 and len(cascade["reviews"]) == len(drafts) + 2 and plain["accuracy"] is not None


def test_a_name_that_published_costs_do_not_know_ends_a_run_before_it_begins(tmp_path, capsys):
    base = t5_on_disk.save(t5_on_disk.t5(), tmp_path / "large")
    small = t5_on_disk.save(t5_on_disk.t5(2), tmp_path / "tiny")
    words = ("-d", f"cascade:model:{small}+maxgram k=[[3,2],[0,2]]", "--task", "mmlu:absent.json")
    recipe = ("--recipe", RECIPES / "bench_csd_t5_work.yaml", "--no-plots", "--out", tmp_path / "out")
    code, _, err = run(capsys, "bench", base, *recipe, *words)
    assert code == 2 and "knows no model" in err and "tiny" in err and err.count("\n") == 1


def test_rows_in_their_columns_are_asked_in_their_prompt(tmp_path, cache_in_tmp):
    file = tmp_path / "sampled_mmlu.json"
    file.write_text(json.dumps([MMLU, {**MMLU, "target": "D"}]), "utf8")
    asked, other = load_task(f"mmlu:{file}", None).questions
    assert asked.prompt == PROMPT and (asked.answer, other.answer) == ("B", "D")
    file.write_text(json.dumps([{**MMLU, "target": "E"}]), "utf8")
    with pytest.raises(ValueError, match="row 1: the answer 'E' is none of its choices A, B, C, D"):
        load_task(f"mmlu:{file}", None)
    file.write_text(json.dumps([{key: value for key, value in MMLU.items() if key != "C"}]), "utf8")
    with pytest.raises(ValueError, match="row 1: no column 'C'"):
        load_task(f"mmlu:{file}", None)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mmlu", "gsm8k"])
def test_a_t5_answers_above_chance_and_a_cascade_writes_the_same_texts(task, taught, tmp_path, cache_in_tmp, capsys):
    words = (
        "bench", taught / "large", "--reference", "plain", "--task", f"{task}:{taught / task}.json", "-d",
        f"cascade:model:{taught / 'small'}+maxgram k=[[4,6],[0,6]] leniency=5", "--max-new-tokens", 16, "--repeats", 1,
        "--batch", 1, "--temperature", 0, "--no-plots", "--json",
    )  # fmt: skip
    code, out, err = run(capsys, *words, "--out", tmp_path / "live")
    assert code == 0, err
    plain, cascade = json.loads(out)["rows"]
    assert (
        plain["texts"] == cascade["same_text"] == 12 and plain["accuracy"] > 0.6
    )  # chance: 1/4 of a letter, 1/5 of a sum
    assert cascade["accuracy"] == plain["accuracy"] and cascade["accepted_length"] > 1.5
    target, tokenizer = load_language_model(taught / "large").eval(), AutoTokenizer.from_pretrained(taught / "large")
    drafts = Cascade([DraftModel(load_language_model(taught / "small")), MaxGram()], [[4, 6], [0, 6]], leniency=5)
    for question in load_task(f"{task}:{taught / task}.json", tokenizer).questions:
        ids = tokenizer(question.prompt, return_tensors="pt").input_ids
        expected = target.generate(ids, max_new_tokens=16, do_sample=False)
        assert torch.equal(generate(target, ids, draft=drafts, max_new_tokens=16, do_sample=False), expected)


def test_their_tables_may_leave_out_the_padding_of_a_vocabulary(tmp_path):
    """T5's table has an entry for each of the tokenizer's 32,100 ids, and the model's vocabulary is 32,128."""
    save_bigrams([1] * 321, tmp_path / "b.json")
    assert len(load_bigrams(tmp_path / "b.json", 324)) == 321
    with pytest.raises(ValueError, match=r"321.*325"):
        load_bigrams(tmp_path / "b.json", 325)
    with pytest.raises(ValueError, match=r"321.*320"):
        load_bigrams(tmp_path / "b.json", 320)
