"""benchmarks/heads.py on a tiny base: equal sizes, figures of many prompts at a time, resuming, and its table."""

import importlib.util
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from specheads import chain
from specheads.data import corpus
from specheads.decoding.generation import prompt_batches
from specheads.models.convert import convert
from tests.support.command_line import ship
from tests.support.tiny_models import tiny_llama

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
spec = importlib.util.spec_from_file_location(
    "benchmark_of_heads", BENCHMARKS / "heads.py"
)  # train/ has a heads.py, too
heads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(heads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """base/ and rows of its vocabulary."""
    folder = ship(tmp_path_factory.mktemp("heads"))
    torch.manual_seed(0)
    rows = torch.randint(2, 258, (12, 24)).tolist()
    (folder / "own.jsonl").write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Tiny random models draft with all of their vocabulary, and prompts are short."""
    monkeypatch.setattr(heads, "EAGLE3", {"steps": 2})
    monkeypatch.setitem(heads.VARIANTS, "eagle3", ("eagle3", {"steps": 2}))
    monkeypatch.setitem(heads.VARIANTS, "mtp", ("mtp", {"steps": 2}))
    monkeypatch.setitem(heads.VARIANTS, heads.WIDE, ("mtp", {"steps": 2}))
    texts = [text for _, text in corpus.texts("held_out")][:4]
    monkeypatch.setattr(heads, "prompts", lambda tokenizer, count: [text[:20] for text in texts][: 2 * count])


class Padding:
    pad_token_id = 0


def run(folder, out, *more, shapes=("greedy chain",), only=("eagle3", "mtp")):
    given = ["--base", folder / "base", "--data", folder / "own.jsonl", "--out", out, "--seeds", 2, "--steps", 2]
    given += [
        "--max-length",
        24,
        "--num-prompts",
        2,
        "--max-new-tokens",
        8,
        "--shapes",
        *shapes,
        "--only",
        *only,
        *more,
    ]
    return heads.main([str(argument) for argument in given])


def test_the_wide_mtp_head_has_eagle3s_parameters_within_one_column_of_its_mlp():
    base = tiny_llama(num_hidden_layers=4)
    eagle3, narrow, wide = (heads.size_of(heads.untrained(name, base)) for name in ("eagle3", "mtp", heads.WIDE))
    column = 3 * base.config.hidden_size
    assert 0 <= eagle3 - wide < column < eagle3 - narrow


@pytest.mark.parametrize("shape", ["greedy chain", "greedy tree"])
def test_prompts_together_give_each_prompts_own_figures(shape):
    """With a vocabulary of 12, some drafts of a head at random are right; no text ends early."""
    model = convert(tiny_llama(num_hidden_layers=4, vocab_size=12), "eagle3", steps=2).eval()
    model.generation_config.eos_token_id = None
    asked = [[5, 6, 7, 8, 9], [11, 3, 10], [4, 9, 8, 7, 6, 5, 4]]
    together, alone = (
        heads.decode(model, shape, prompt_batches.batches(Padding, asked, model.device, size), 24)
        for size in (len(asked), 1)
    )
    assert together == alone and len(alone) == 3
    assert sum(tokens for tokens, _ in alone) > sum(steps for _, steps in alone)
    if shape == "greedy chain":  # counted another way
        out = model.generate(
            torch.tensor([asked[1]]), tree=chain(heads.DEPTH), draft="head", max_new_tokens=24,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert alone[1] == (out.sequences.shape[1] - len(asked[1]) - 1, len(out.steps) - 1)


def test_a_run_resumes_by_variant_seed_and_shape(folder, tmp_path, capsys, monkeypatch):
    assert run(folder, tmp_path, only=("eagle3",)) == 0
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("heads/*/model.safetensors")}
    assert len(kept) == 2
    shutil.rmtree(tmp_path / "heads" / "eagle3-1")  # a seed that was not finished
    trained = []
    original = heads.train
    monkeypatch.setattr(
        heads, "train", lambda name, seed, *rest: trained.append((name, seed)) or original(name, seed, *rest)
    )
    assert run(folder, tmp_path, shapes=("greedy chain", "sampled chain")) == 0
    assert trained == [("mtp", 0), ("eagle3", 1), ("mtp", 1)]
    record = json.loads((tmp_path / "heads" / "eagle3-0" / "figures.json").read_text())
    assert set(record["work"]) == {"greedy chain", "sampled chain"} and len(record["work"]["sampled chain"]) == 4
    found = json.loads((tmp_path / "heads.json").read_text())["variants"]
    assert [one["variant"] for one in found] == ["mtp", "eagle3"]
    figures = [tmp_path / "heads" / f"eagle3-{seed}" / "figures.json" for seed in range(2)]
    work = [json.loads(path.read_text())["work"]["greedy chain"] for path in figures]
    tokens, steps = (sum(one[i] for each in work for one in each) for i in range(2))
    assert found[1]["accepted_length"]["greedy chain"] == pytest.approx(tokens / steps)
    text = (tmp_path / "heads.md").read_text()
    assert "| mtp | 0.01 M | 2 |" in text and "minus that of eagle3" in text and "\n2 steps of 3 rows" in text


def test_training_speed_counts_rows_as_long_as_they_are(folder, tmp_path, monkeypatch):
    """Steps of a second, of 3 rows that have 18 tokens in the mean."""
    rows = [json.loads(line)["input_ids"] for line in (folder / "own.jsonl").read_text().splitlines()]
    rows = [row[: 12 if i % 2 else 24] for i, row in enumerate(rows)]
    ragged = tmp_path / "ragged.jsonl"
    ragged.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows))
    clock = heads.Clock
    monkeypatch.setattr(clock, "on_step_end", lambda self, *args, **more: self.marks.append(float(len(self.marks))))
    run(folder, tmp_path / "out", "--data", ragged, only=["mtp"])
    (found,) = json.loads((tmp_path / "out" / "heads.json").read_text())["variants"]
    assert found["tokens_per_second"] == pytest.approx(3 * 18)


def test_a_variant_of_a_single_seed_is_named_and_has_no_row(folder, tmp_path):
    run(folder, tmp_path, "--bf16")
    shutil.rmtree(tmp_path / "heads" / "mtp-1")
    options = ["--base", folder / "base", "--data", folder / "own.jsonl", "--out", tmp_path, "--seeds", 2, "--steps", 2]
    options += ["--max-length", 24, "--num-prompts", 2, "--max-new-tokens", 8, "--shapes", "greedy chain", "--bf16"]
    assert heads.main([str(o) for o in [*options, "--only", "eagle3"]]) == 0
    text = (tmp_path / "heads.md").read_text()
    assert "| mtp |" not in text and "with the seeds done: mtp (1)" in text and "under bfloat16 autocast" in text


def test_without_eagle3_the_others_are_compared_with_the_first(folder, tmp_path):
    assert run(folder, tmp_path, only=("mtp", heads.WIDE)) == 0
    text = (tmp_path / "heads.md").read_text()
    assert "minus that of mtp" in text and text.count("| mtp, wide |") == 2 and text.count("| mtp |") == 1


def test_a_difference_is_between_the_seeds_that_both_have():
    """Seeds differ tenfold; a head gains one token on every prompt of two steps."""

    def records(gains, gained):
        return [
            {"seed": seed, "work": {"greedy chain": [(gain + gained, 2), (3 * gain + gained, 2)]}}
            for seed, gain in gains.items()
        ]

    found = heads.difference(records({0: 2, 2: 20}, 1), records({2: 20, 1: 7, 0: 2}, 0), "greedy chain")
    assert found["accepted_length"] == pytest.approx(0.5) and found["interval"] == pytest.approx((0.5, 0.5))


def test_figures_of_another_run_are_not_mixed_in_nor_shown_for_it(folder, tmp_path):
    run(folder, tmp_path, only=("eagle3",))
    path = tmp_path / "heads" / "eagle3-0" / "figures.json"
    before = path.read_bytes()
    (tmp_path / "own.jsonl").write_text("".join(reversed((folder / "own.jsonl").read_text().splitlines(True))))
    shutil.copytree(folder / "base", tmp_path / "base")
    for options, other in (
        (("--learning-rate", "1e-3"), r"learning_rate: 0\.004, not 0\.001"),
        (("--num-prompts", 1), "num_prompts: 2, not 1"),
        (("--data", tmp_path / "own.jsonl"), "data: 12 rows, checksum .*, not 12 rows"),
    ):
        for only in ("eagle3", "mtp"):
            with pytest.raises(SystemExit, match=f"is of another run .*{other}"):
                run(folder, tmp_path, *options, only=(only,))
    assert run(folder, tmp_path, "--base", tmp_path / "base", only=("eagle3",)) == 0  # the same, elsewhere
    assert path.read_bytes() == before
    older = json.loads(before)
    older["budget"] = {n: v for n, v in older["budget"].items() if n not in ("base", "data", "prompts")}
    path.write_text(json.dumps(older))
    assert run(folder, tmp_path, only=("eagle3",)) == 0


def test_the_command_has_every_option_that_is_not_its_default(folder, tmp_path):
    run(folder, tmp_path, "--batch-size", 2, "--learning-rate", "1e-3", only=("eagle3",))
    command = json.loads((tmp_path / "heads.json").read_text())["command"]
    given = heads.parser().parse_args(shlex.split(command)[2:])
    wanted = {"base": str(folder / "base"), "batch_size": 2, "max_length": 24, "learning_rate": 1e-3}
    wanted |= {"num_prompts": 2, "max_new_tokens": 8, "steps": 2, "seeds": 2, "bf16": False}
    assert {name: getattr(given, name) for name in wanted} == wanted
