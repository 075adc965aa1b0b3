"""benchmarks/seeds.py on tiny models with a made-up original: what it measures, counts and refuses."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import seeds
from seed_race import figures, ours, theirs, workers
from seed_race.settings import Race, races

from tests.support.command_line import ship
from tests.support.tiny_models import tiny_llama

# romsto's modules and names; its greedy text is the target's own, but for the first token of a prompt it is told of.
ORIGINAL = {
    "sampling/__init__.py": "from .speculative_decoding import speculative_generate",
    "sampling/speculative_decoding.py": '''
def speculative_generate(inputs, drafter, target, gamma, max_gen_len, eos_tokens_id, use_cache, logits_processor):
    import torch
    print("a line that is no answer")
    ids = list(inputs)
    for _ in range(max_gen_len):
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    new = ids[len(inputs):]
    return ([(new[0] + 1) % 90] + new[1:], 0.5) if WRONG == inputs else (new, 0.25)

WRONG = None
''',
    "ngram_assisted/__init__.py": '''
from sampling import speculative_generate

class NGramStorage:
    def __init__(self, n, vocab_size):
        pass

def ngram_assisted_speculative_generate(inputs, storage, target, filler_top_k, **options):
    return speculative_generate(inputs, None, target, **options)
''',
    "utils/__init__.py": "",
    "utils/logits_processor.py": '''
class GreedyProcessor:
    pass

class MultinomialProcessor:
    def __init__(self, temperature):
        pass
''',
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """base/ and draft/, of one byte tokenizer, and a checkout of the made-up original."""
    folder = ship(tmp_path_factory.mktemp("seeds"))
    sizes = {"vocab_size": 258, "num_hidden_layers": 1}
    tiny_llama(**sizes).save_pretrained(folder / "draft")
    for name, text in ORIGINAL.items():
        (folder / "romsto" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "romsto" / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def modules():
    """An original's modules have common names: they are forgotten after each test."""
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("sampling", "ngram_assisted", "utils", "termcolor"):
            del sys.modules[name]


def arguments(folder, out, *more):
    small = ("--num-prompts", 2, "--prompt-tokens", 12, "--max-new-tokens", 6, "--repeats", 2, "--gamma", 2)
    given = ("--base", folder / "base", "--draft", folder / "draft", "--out", out, *small, *more)
    return [str(argument) for argument in given]


def test_a_race_counts_the_greedy_texts_that_are_the_targets_own(folder, tmp_path, capsys, monkeypatch):
    made = seeds.prepare

    def prepare(options, work):
        job = made(options, work)
        sys.path.insert(0, str(folder / "romsto"))
        import sampling.speculative_decoding as original

        sys.path.remove(str(folder / "romsto"))
        original.WRONG = job["prompts"][1]
        return job

    monkeypatch.setattr(seeds, "prepare", prepare)
    assert seeds.main(arguments(folder, tmp_path, "--romsto", folder / "romsto", "--notebook", "--top-k", 3)) == 0
    found = json.loads((tmp_path / "seeds.json").read_text())["races"]
    assert [(r["system"], r["same_texts"]) for r in found] == [
        ("romsto", {"theirs": 1, "ours": 2}), ("romsto", None), ("romsto", {"theirs": 1, "ours": 2}),
        ("notebook", {"theirs": 2, "ours": 2}), ("notebook", None),
    ]  # fmt: skip
    first, notebook = found[0], found[3]
    assert first["acceptance"]["theirs"] == (0.25 + 0.5) / 2
    assert first["passes_per_token"]["theirs"] == 1.0
    assert 1 / 3 <= first["passes_per_token"]["ours"] <= 1.0
    assert first["new_tokens"] == {"theirs": 6, "ours": 6}
    assert notebook["new_tokens"]["theirs"] >= 6 == notebook["new_tokens"]["ours"]
    text = (tmp_path / "seeds.md").read_text()
    assert "| romsto | γ = 2, greedy | – | 6.0 |" in text
    assert "| 1 of 2 | 2 of 2 | 0.38 |" in text
    assert "a line that is no answer" not in capsys.readouterr().out


def test_a_wrong_greedy_text_of_ours_fails_and_writes_nothing(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ours.Romsto, "generate", lambda self, prompt, count, setting: ([1] * count, 0.0))
    assert seeds.main(arguments(folder, tmp_path / "out", "--romsto", folder / "romsto")) == 1
    assert "romsto, γ = 2, greedy: 0 of 2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def one(tokens, seconds):
    return {"ids": [5] * tokens, "cpu_seconds": seconds}


def test_a_ratio_is_the_median_of_ratios_inside_a_repeat():
    # 10 times slower in the second repeat, both of them; the third repeat favours ours.
    slow = [[one(4, 2.0), one(4, 2.0)], [one(4, 20.0), one(4, 20.0)], [one(4, 2.0), one(4, 2.0)]]
    fast = [[one(4, 1.0), one(4, 1.0)], [one(4, 10.0), one(4, 10.0)], [one(4, 0.5), one(4, 0.5)]]
    assert figures.speeds(slow, "cpu_seconds") == [2.0, 0.2, 2.0]
    assert figures.ratio(fast, slow, "cpu_seconds") == 2.0
    assert figures.ratio(slow, fast, "cpu_seconds") == 0.5


def test_an_interval_is_wide_where_prompts_differ_and_a_point_where_none_do():
    level = [[one(4, 1.0)] * 6] * 3
    twice = [[one(4, 2.0)] * 6] * 3
    assert figures.interval(level, twice, "cpu_seconds", draws=50) == (2.0, 2.0)
    uneven = [[one(4, s) for s in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0)]] * 3
    low, high = figures.interval(level, uneven, "cpu_seconds", draws=200)
    assert 1.0 <= low < 1.7 < 2.3 < high <= 3.0


def test_a_text_may_run_over_but_not_short_and_must_agree_in_every_repeat():
    own = [[1, 2, 3], [4, 5, 6]]

    def texts(*rows):
        return [[{"ids": ids} for ids in row] for row in rows]

    assert figures.same_texts(texts([[1, 2, 3, 9], [4, 5, 6]]), own) == 2
    assert figures.same_texts(texts([[1, 2], [4, 5, 6]]), own) == 1
    assert figures.same_texts(texts(own, [[1, 2, 3], [4, 5, 7]]), own) == 1


def test_passes_are_counted_once_each(base):
    counter = theirs.PassCounter(base)
    theirs.greedy_text(base, [3, 4, 5], 7)
    assert counter.count == 7


def test_the_targets_own_text_is_that_of_generate(base):
    prompt = torch.tensor([[11, 12, 13, 14]])
    options = {"do_sample": False, "min_new_tokens": 9, "max_new_tokens": 9, "eos_token_id": None}
    out = base.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert theirs.greedy_text(base, prompt[0].tolist(), 9) == out[0, 4:].tolist()


def test_top_k_probs_are_those_of_the_k_likeliest():
    probs = theirs.top_k_probs(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), 2)
    assert probs[0, [0, 3]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(probs[0, [1, 2]], torch.tensor([3.0, 2.0]).softmax(-1))


def test_a_checkpoint_is_written_so_that_older_versions_read_its_rope(tmp_path):
    model = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})
    model.save_pretrained(tmp_path / "saved")
    out = seeds.portable(tmp_path / "saved", tmp_path / "portable")
    config = json.loads((tmp_path / "portable" / "config.json").read_text())
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert config["eos_token_id"] is None
    ids = torch.arange(3, 40).unsqueeze(0)
    again = theirs.load_model(out)
    assert again.generation_config.eos_token_id is None
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_another_model_in_another_python_is_refused():
    def worker(*logits):
        return SimpleNamespace(introduced={"logits": list(logits), "versions": {"transformers": "4.44.2"}})

    workers.refuse_other_model("fsd", worker(1.0, 2.0), worker(1.0, 2.0005))
    with pytest.raises(SystemExit, match=r"fsd: under transformers 4.44.2 the target's logits differ by up to 0.5"):
        workers.refuse_other_model("fsd", worker(1.0, 2.5), worker(1.0, 2.0))


def test_a_python_that_ends_early_says_why(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: nothing here' >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match="ended with 3: ModuleNotFoundError: nothing here"):
        workers.Remote(str(python), {}, tmp_path / "work")


@pytest.mark.slow  # two more interpreters
def test_an_original_in_its_own_python_gives_what_it_gives_here(folder, tmp_path):
    more = ("--romsto", folder / "romsto", "--old", sys.executable)
    assert seeds.main(arguments(folder, tmp_path, *more)) == 0
    found = json.loads((tmp_path / "seeds.json").read_text())["races"]
    assert [r["called_with"]["cache"] for r in found] == [False, True] * 3
    assert all(r["own_texts_alike"] == 2 for r in found)
    assert [r["same_texts"]["theirs"] for r in found if r["same_texts"]] == [2] * 4
    assert all(r["passes_per_token"]["theirs"] == 1.0 for r in found)


def test_without_a_python_for_their_caches_they_are_left_out():
    options = {"gamma": 5, "top_k": 50, "threshold": 0.4, "divergence": "js_div", "romsto": "x", "csd": None}
    given = SimpleNamespace(**options, fsd=None, notebook=False, modelopt=None, old=None)
    assert {race.caches for race in races(given)} == {(False,)}
    given.old = "python"
    assert {race.caches for race in races(given)} == {(False, True)}
    assert all(isinstance(race, Race) and race.system == "romsto" for race in races(given))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), "no original to race"),
        (("--romsto", "nowhere"), "--romsto nowhere has no sampling/speculative_decoding.py"),
        (("--old", "nowhere"), "--old nowhere is no program"),
        (("--fsd", "{fsd}"), "--fsd needs --old"),
        (("--notebook", "--repeats", "0"), "--repeats 0 "),
        (("--notebook", "--draft", "nowhere"), "--draft nowhere has no config.json"),
        (("--modelopt", "{python}", "--modelopt-head", "nowhere"), "--modelopt-head nowhere has no config.json"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(folder, tmp_path, capsys, more, told):
    (tmp_path / "fsd_utils.py").touch()
    more = [part.format(fsd=tmp_path, python=sys.executable) for part in more]
    with pytest.raises(SystemExit) as refused:
        seeds.main(arguments(folder, tmp_path / "out", *more))
    assert refused.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
