"""Lossy rules, tasks and cascades in specheads bench: what their texts are worth, beside what they gain."""

import json
import operator
import random

import pytest
import torch

from specheads.bench.compare import plots, report, run
from specheads.bench.compare.decoder_spec import BenchSetup
from specheads.bench.compare.judge import distance
from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.prompt_sets import PromptSet, prompt_sets
from specheads.models.named import Models
from specheads.pictures import LIGHT
from tests.support.command_line import run as program
from tests.support.tiny_models import tiny_llama

ROWS = [{"question": f"What is {n} and {n}", "answer": f"#### {2 * n}"} for n in range(5)]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf8")
    return file


def quiet(fraction, note):
    """No progress."""


def measured(shipped, folder, sets=None, **options):
    given = {"reference": "plain", "batch": 2, "temperature": 0, "max_new_tokens": 10, "repeats": 1, **options}
    asked = BenchOptions(out=folder, **given)
    setup = BenchSetup(Models.load(str(shipped / "base")), shipped, 10, 80, neutral=True)
    sets = sets or prompt_sets(asked, setup.models.tokenizer, None)
    outcome = run.run(asked, setup, run.decoders_of(asked), sets, quiet)
    return outcome, {row["decoder"]: row for row in report.rows_of(outcome.rounds, "plain", 1.0)}


def test_a_lossy_rule_is_set_beside_the_exact_one_and_its_texts_are_judged(shipped, questions, tmp_path, cache_in_tmp):
    rules = {"decoder": "eagle3", "tree": "chain:2", "accept": ("fuzzy:js:0.7", "typical")}
    outcome, rows = measured(shipped, tmp_path, task=f"gsm8k:{questions}", **rules)
    assert outcome.complete and outcome.left_out == {}
    exact, lossy = rows["eagle3 tree=chain:2"], rows["eagle3 tree=chain:2 accept=fuzzy:js:0.7"]
    assert exact["lossless"] and exact["nats"] == pytest.approx(0, abs=1e-6) and exact["over_exact"] is None
    assert not lossy["lossless"] and lossy["nats"] > 0 and lossy["accepted_length"] > exact["accepted_length"]
    assert exact["same_text"] == 5 and exact["accuracy"] == rows["plain"]["accuracy"]
    ratio, low, high = lossy["over_exact"]
    assert ratio == pytest.approx(lossy["tokens_per_second"] / exact["tokens_per_second"]) and low <= ratio <= high


def test_a_base_s_own_penalties_change_neither_the_text_nor_a_lossless_rule_s_distance(shipped, tmp_path, monkeypatch):
    load, penalties = Models.load, {"repetition_penalty": 1.9, "no_repeat_ngram_size": 1, "min_new_tokens": 9}

    def strict(*args, **options):
        models = load(*args, **options)
        models.target.generation_config.update(**penalties)
        return models

    sets, decoders = [PromptSet("p", [[5, 6], [7, 8, 9]], [None] * 2)], ("transformers", "eagle3")
    options = {"decoder": decoders, "tree": "chain:2", "accept": "typical", "temperature": (0, 1.5)}
    plain, _ = measured(shipped, tmp_path / "plain", sets, **options)
    monkeypatch.setattr(Models, "load", strict)
    penalized, _ = measured(shipped, tmp_path / "penalties", sets, **options)
    lengths = [[one["decoders"][name]["nats"] for name in one["decoders"]] for one in plain.rounds]
    assert lengths == [[one["decoders"][name]["nats"] for name in one["decoders"]] for one in penalized.rounds]
    for one in penalized.rounds:
        for name in ("plain", "transformers", "eagle3 tree=chain:2"):
            assert one["temperature"] or one["decoders"][name]["nats"] == pytest.approx(0, abs=1e-5), name


def test_a_greedy_text_s_distance_is_the_log_ratio_to_the_argmax_and_a_sampled_one_s_has_mean_0():
    base = tiny_llama()
    prompts, texts = [[5, 6, 7], [9]], [[11, 12], [3, 4, 5, 90]]
    nats = excess = 0.0
    base.requires_grad_(False)
    for prompt, text in zip(prompts, texts, strict=True):
        for i, x in enumerate(text):
            log_p = base(torch.tensor([prompt + text[:i]])).logits[0, -1].double().log_softmax(-1)
            nats += float(log_p.max() - log_p[x])
            best, ids = (base(torch.tensor([prompt + text[:i]])).logits[0, -1].double() / 0.7).topk(50)
            p = dict(zip(ids.tolist(), best.softmax(-1).tolist(), strict=True))
            entropy = -sum(v * torch.tensor(v).log().item() for v in p.values())
            excess += -torch.tensor(p[x]).log().item() - entropy if x in p else 0
    far = [distance(base, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    assert sum(part for part, _ in far) == pytest.approx(nats, rel=1e-4) and not any(outside for _, outside in far)
    sampled = [distance(base, prompt, text, 0.7, 50) for prompt, text in zip(prompts, texts, strict=True)]
    assert sum(part for part, _ in sampled) == pytest.approx(excess, rel=1e-3, abs=1e-3)
    assert 0 < sum(outside for _, outside in sampled) < 6
    # Under p itself the excess is 0 in the mean: summed over all tokens, each with its chance.
    p = (base(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(-1)
    every = [distance(base, [5, 6, 7], [x], 0.7)[0] for x in range(97)]
    assert sum(chance * each for chance, each in zip(p.tolist(), every, strict=True)) == pytest.approx(0, abs=1e-4)
    assert max(every) > 1 and min(every) < -0.1


def row_of(decoder, speed_up=1.0, accuracy=0.5, nats=0.0, **values):
    lossless = report.is_lossless(decoder)
    return {
        "prompts": "p", "batch": 1, "temperature": 0.0, "top_k": 0, "decoder": decoder, "reference": decoder == "plain",
        "lossless": lossless, "accuracy": accuracy, "nats": nats, "over_exact": None if lossless else [speed_up],
        "speed_up": speed_up, "speed_up_interval": None, **values,
    }  # fmt: skip


MADE = [
    row_of("plain"),
    row_of("head tree=chain:3", 2.0),
    row_of("head tree=chain:3 accept=fuzzy:js:0.3", 1.5, accuracy=0.4, nats=0.2),
    row_of("head tree=chain:3 accept=fuzzy:js:0.1", 1.25, accuracy=0.495, nats=0.01),
    row_of("head tree=chain:3 accept=typical", 0.9, accuracy=0.6, nats=0.02),
]


def test_the_fastest_rule_that_keeps_accuracy_is_named_or_that_there_is_none():
    (line,) = report.fastest_lossy(MADE)
    assert "head tree=chain:3 accept=fuzzy:js:0.1, 1.25× its speed, keeps 98% of the accuracy" in line
    (line,) = report.fastest_lossy(MADE[:3])
    assert "no lossy rule keeps 98%" in line
    assert list(report.fastest_lossy(MADE[:2])) == []


def test_bars_are_the_speeds_over_one_axis_greedy_text_first_and_engines_in_their_colours():
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    rows = [
        {**row_of("head", 2.0), "temperature": 0.8, "speed_up_interval": [1.5, 2.5]},
        row_of("plain"),
        row_of("head", 3.0),
    ]
    rows += [row_of("openvino", 1.5), row_of("transformers")]
    record = {"rows": rows, "reference": "plain", "engines": {"openvino": "openvino", "transformers": "transformers"}}
    figure = plots.speed_ups(record, LIGHT)
    greedy, sampled = figure.axes
    assert [panel.get_title() for panel in figure.axes] == ["p, batch 1, T = 0", "p, batch 1, T = 0.8"]
    assert greedy.get_xlim() == sampled.get_xlim() and [bar.get_width() for bar in sampled.patches] == [2.0]
    assert [bar.get_width() for bar in greedy.patches] == [1.0, 3.0, 1.5, 1.0]
    assert [text.get_text() for text in greedy.texts] == ["1.00×", "3.00×", "1.50×", "1.00×"]
    (ends,) = (line for line in sampled.collections if len(line.get_segments()))
    assert ends.get_segments()[0][:, 0].tolist() == [1.5, 2.5]
    colors = [to_hex(bar.get_facecolor()) for bar in greedy.patches]
    assert colors[0] == colors[1] == LIGHT.color(0) and len(set(colors)) == 3
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"specheads", "openvino", "transformers"}


def test_the_front_is_what_nothing_beats_and_its_thresholds_stand_at_its_points():
    pytest.importorskip("matplotlib")
    rng = random.Random(0)
    for least in (True, False):
        points = [(rng.randrange(6), (float(rng.randrange(6)),), str(i)) for i in range(40)]
        better = operator.le if least else operator.ge
        beaten = {
            (x, speed) for x, (speed,), _ in points for a, (b,), _ in points
            if better(a, x) and b >= speed and (a, b) != (x, speed)
        }  # fmt: skip
        kept = [(x, speed) for x, (speed,), _ in plots.front(points, least=least)]
        assert set(kept) == {(x, speed) for x, (speed,), _ in points} - beaten and len(kept) == len(set(kept))
    nats, accuracy = plots.trade_offs({"rows": MADE, "reference": "plain"}, LIGHT).axes
    assert [text.get_text() for text in nats.texts] == ["exact", "fuzzy:js:0.1", "fuzzy:js:0.3"]
    assert [text.get_text() for text in accuracy.texts] == ["typical", "exact", "fuzzy:js:0.1", "fuzzy:js:0.3"]
    assert [*plots.pictures_of({"rows": MADE, "reference": "plain"})] == ["bench", "trade_off"]
    assert [*plots.pictures_of({"rows": MADE[:2], "reference": "plain"})] == ["bench"]


def test_shards_measure_all_rounds_between_them(shipped, tmp_path):
    sets = [PromptSet("p", [[5, 6], [7, 8], [9, 4]], [None] * 3)]
    options = {"decoder": "lookup", "batch": 1, "repeats": 2}
    parts = [measured(shipped, tmp_path, sets, **options, shard=f"{i}/2")[0].rounds for i in (1, 2)]
    whole, _ = measured(shipped, tmp_path, sets, **options)
    assert [len(part) for part in parts] == [4, 2] and len(whole.rounds) == 6
    assert all(one in whole.rounds for part in parts for one in part)


def test_the_command_shows_what_a_lossy_rule_trades(shipped, questions, tmp_path, cache_in_tmp, capsys):
    ask = (
        "bench", shipped, "-d", "eagle3", "--tree", "chain:2", "--accept", "fuzzy:js:0.1,0.4", "--reference", "plain",
        "--task", f"gsm8k:{questions}", "--num-prompts", 2, "--max-new-tokens", 6, "--batch", 2, "--temperature", 0,
        "--repeats", 1, "--out", tmp_path,
    )  # fmt: skip
    code, out, err = program(capsys, *ask)
    assert code == 0, err
    assert all(name in out for name in ("accuracy", "nats", "× exact", "accept=fuzzy:js:0.4"))
    assert "× exact: tokens/s over the same drafts" in out and "SWI" not in out
    record = json.loads((tmp_path / "bench.json").read_text("utf8"))
    rules = [row["decoder"].partition("accept=")[2] for row in record["rows"]]
    assert rules == ["", "", "fuzzy:js:0.1", "fuzzy:js:0.4"] and record["accept"] == ["fuzzy:js:0.1,0.4"]
