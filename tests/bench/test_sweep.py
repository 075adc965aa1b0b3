"""Sweeps: what is done stays done, one worker or two, and rows are right."""

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from huggingface_hub import constants
from transformers import LlamaForCausalLM

from specheads import DraftModel, MaxGram, PromptLookup, chain, comb, generate
from specheads.bench.sweep import measure as measuring
from specheads.bench.sweep.drafters import Bench
from specheads.bench.sweep.grid import Sweep
from specheads.bench.sweep.kl import Distance, distance
from specheads.bench.sweep.measure import TIMED
from specheads.bench.sweep.run import Results, common_of, complete, run
from specheads.bench.sweep.tasks import Question, Task
from specheads.decoding.drafters import AutoDrafter, Cascade
from specheads.decoding.drafters.maxgram import save_bigrams
from specheads.decoding.generation import recorded
from specheads.models.costs import cost_key, cost_path
from specheads.models.spec_model import SpecModel
from tests.support.auto_costs import FREE
from tests.support.command_line import run as program
from tests.support.tiny_models import tiny_llama

ROWS = [{"question": f"What is {n} and {n}", "answer": f"#### {2 * n}"} for n in range(5)]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf8")
    return str(file)


def asked(shipped, questions, **options):
    given = {
        "drafters": [str(shipped / "eagle3")], "accept": ["fuzzy:js:0.7", "typical"], "gamma": 2, "task": "gsm8k",
        "data": questions, "max_new_tokens": 10, "batch_size": 2, "speed_prompts": 2,
    }  # fmt: skip
    return Sweep.from_dict({**given, **options})


def quiet(fraction, note):
    """No progress."""


def untimed(rows):
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


# ---------------------------------------------------------------------------------------------------------- resuming


SETTINGS = Sweep(("head",), accept=("fuzzy:js:0.1,0.2,0.3",), gamma=(3, 5)).settings()


class Counting:
    """Measures by a rule of its own, and is killed before setting number `stops`."""

    def __init__(self, stops=None):
        self.done, self.stops = [], stops

    def __call__(self, settings, within):
        for setting in settings:
            if len(self.done) == self.stops:
                raise KeyboardInterrupt
            self.done.append(setting)
            yield setting, {"accept": setting.accept, "tree": setting.tree, "value": len(str(setting))}


@pytest.mark.parametrize("torn", [b"", b'{"key": "0123", "row": {"acc'])
@pytest.mark.parametrize("stops", [0, 1, 4])
def test_a_killed_sweep_resumes_to_the_file_of_one_that_was_not(tmp_path, stops, torn):
    whole, cut = tmp_path / "whole" / "r.jsonl", tmp_path / "cut" / "r.jsonl"
    rows = complete(Results(whole), SETTINGS, "common", Counting(), quiet)
    killed = Counting(stops)
    said = f"^after {stops} of {len(SETTINGS)} settings; the same" if stops else "^before anything was measured$"
    with pytest.raises(KeyboardInterrupt, match=said):
        complete(Results(cut), SETTINGS, "common", killed, quiet)
    with open(cut, "ab") as file:
        file.write(torn)  # the crash cut the next line
    again = Counting()
    assert complete(Results(cut), SETTINGS, "common", again, quiet) == rows
    assert killed.done == SETTINGS[:stops] and again.done == SETTINGS[stops:]
    assert cut.read_bytes() == whole.read_bytes()
    assert complete(Results(cut), SETTINGS, "common", Counting(0), quiet) == rows  # nothing is left to do


def test_other_prompts_or_another_setting_are_measured_anew_and_another_file_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    complete(Results(path), SETTINGS[:2], "common", Counting(), quiet)
    other = Counting()
    complete(Results(path), SETTINGS[:3], "other prompts", other, quiet)
    assert other.done == SETTINGS[:3]
    more = Counting()
    complete(Results(path), SETTINGS[:3], "common", more, quiet)
    assert more.done == SETTINGS[2:3]
    path.write_text('{"a": 1}\n', "utf8")
    with pytest.raises(ValueError, match="line 1 is no result of"):
        Results(path)


def test_another_bigram_table_default_tree_costs_or_machine_are_measured_anew(shipped, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr("os.getloadavg", lambda: (random.random() * 100, 0, 0))
    folder, table = shutil.copytree(shipped, tmp_path / "shipped"), tmp_path / "bigrams.json"
    names = [str(folder / "eagle3"), f"maxgram:{table}", "auto"]
    sweep = asked(folder, None, drafters=names, accept="exact", task="prompts", data=[])
    task = Task("prompts", [Question([5, 6], "")], 4, None)

    def common(*workers):
        return common_of(Bench(sweep), sweep, task, *workers)

    save_bigrams([0] * 258, table)
    first = common()
    assert common() == first, "whatever the load"
    save_bigrams([0] * 257 + [1], table)
    seen = {first, common()}
    model = SpecModel.from_pretrained(folder / "eagle3")
    model.set_default_tree(((0,), (0, 0)))
    model.save_pretrained(folder / "eagle3")
    seen |= {common()}
    key = cost_key(model.base, model.head)
    replace(FREE, key=key).save(cost_path(key))
    seen |= {common()}
    monkeypatch.setattr(transformers, "__version__", "4.0")
    assert len(seen | {common()}) == 5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    assert common() != common(2), "workers share the threads"


def test_progress_never_goes_back_and_ends_at_1(tmp_path):
    told = []

    def measured(settings, within):
        for setting in settings:
            within(0.5, "half")
            yield setting, {}

    complete(Results(tmp_path / "r"), SETTINGS, "c", measured, lambda fraction, note: told.append(fraction))
    assert told == sorted(told) and told[-1] == 1 and told.count(1) == 1 and len(told) > len(SETTINGS)


# ------------------------------------------------------------------------------------------------- rows that are right


def test_rows_say_what_generate_does(shipped, questions, tmp_path, cache_in_tmp):
    sweep = asked(shipped, questions)
    told = []
    rows = run(sweep, tmp_path / "one", tell=lambda part, note: told.append((part, note)))
    parts = [part for part, _ in told]
    assert parts == sorted(parts) and parts[-1] == 1
    judging = [part for part, note in told if note.startswith("0 of 4 done; judging none")]
    assert len(judging) == 3 and 0.1 < judging[0] < judging[1] < judging[2] < 0.25, "a batch of 2 rows of 5 each"
    exact = next(row for row in rows if row["accept"] == "exact")
    lossy = next(row for row in rows if row["accept"] == "fuzzy:js:0.7")
    plain = rows[0]
    assert plain["accepted_length"] == 1 and plain["drafted"] == 0 and plain["reference"] is None
    assert exact["lossless"] and exact["mean_kl"] == pytest.approx(0, abs=1e-6) and not lossy["lossless"]
    assert exact["tokens"] == plain["tokens"] and exact["correct"] == plain["correct"]
    assert lossy["mean_kl"] > 0 and lossy["accepted_length"] > exact["accepted_length"]
    assert all(row["speed_up"] > 0 and len(row["speed_up_of_each_repeat"]) == 1 for row in rows)
    assert all(row["speed_up_interval"][0] <= row["speed_up"] <= row["speed_up_interval"][1] for row in (exact, lossy))
    assert "eagle3 chain:2 exact" in lossy["reference"] and exact["reference"] == "none"


@pytest.mark.slow
def test_two_workers_say_what_one_does(shipped, questions, tmp_path, cache_in_tmp):
    sweep = asked(shipped, questions)
    rows = run(sweep, tmp_path / "one", tell=quiet)
    spread = run(sweep, tmp_path / "two", workers=2, tell=quiet)
    assert untimed(spread) == untimed(rows)
    assert [len(Results(tmp_path / name / "results.jsonl").rows) for name in ("one", "two")] == [4, 4]
    before = (tmp_path / "two" / "results.jsonl").read_bytes()
    assert run(sweep, tmp_path / "two", workers=2, tell=quiet) == spread
    assert (tmp_path / "two" / "results.jsonl").read_bytes() == before


def test_speed_is_of_prompts_spaced_over_the_task(shipped, questions, tmp_path, cache_in_tmp, monkeypatch):
    asked_for, batches = [], measuring.prompt_batches.batches
    monkeypatch.setattr(
        measuring.prompt_batches,
        "batches",
        lambda t, prompts, *more, **options: asked_for.append(prompts) or batches(t, prompts, *more, **options),
    )
    run(asked(shipped, questions, accept="exact", max_new_tokens=2), tmp_path, tell=quiet)
    timed, *judged = asked_for[: len(asked_for) // 2]  # of no drafts; the exact rule's are the same
    every = [prompt for batch in judged for prompt in batch]
    assert len(every) == 5 and timed == [every[0], every[2]]


def test_prompts_are_sampled_independently_and_alike_under_every_lossless_setting(shipped, tmp_path, monkeypatch):
    file, texts, race = tmp_path / "p.txt", [], measuring.runner.race
    file.write_text("def f(x):\n" * 5, "utf8")

    def watched(*given, **options):
        found = race(*given, **options)
        texts.extend([run.output.tokens[0] for run in repeats[0]] for repeats in found.runs.values())
        return found

    monkeypatch.setattr(measuring.runner, "race", watched)
    monkeypatch.setattr(measuring, "distance", lambda base, prompts, own, *more: texts.append(own) or Distance())
    options = {"task": "prompts", "data": [str(file)], "accept": "exact", "temperature": 1.5}
    run(asked(shipped, None, **options, batch_size=5), tmp_path, tell=quiet)
    judged, raced = ([one for one in texts if len(one) == n] for n in (5, 2))
    assert len(judged) == 2 and len(raced) == 3
    assert len(set(map(tuple, judged[0]))) == 5, "one prompt five times: five texts"
    assert judged[0] == judged[1] and all(one == [judged[0][0], judged[0][2]] for one in raced)


def test_a_base_s_own_penalties_change_neither_the_text_nor_a_lossless_rule_s_distance(
    shipped, tmp_path, monkeypatch, capsys
):
    folder, texts = shutil.copytree(shipped, tmp_path / "shipped"), []
    monkeypatch.setattr(
        measuring,
        "distance",
        lambda base, prompts, own, *more: texts.append(own) or distance(base, prompts, own, *more),
    )
    options = {"task": "prompts", "num_prompts": 3, "accept": "exact", "temperature": [0, 1.5], "data": []}
    plain = run(asked(folder, None, **options), tmp_path / "plain", tell=quiet)
    base = LlamaForCausalLM.from_pretrained(folder / "base")
    penalties = {"repetition_penalty": 1.9, "no_repeat_ngram_size": 1, "min_p": 0.9, "min_new_tokens": 9}
    base.generation_config.update(do_sample=True, **penalties)
    base.generation_config.save_pretrained(folder / "base")
    rows = run(asked(folder, None, **options), tmp_path / "penalties", tell=quiet)
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :] and len(rows) == len(plain) == 4
    greedy = [row for row in rows if not row["temperature"]]
    assert [row["mean_kl"] for row in greedy] == pytest.approx([0, 0], abs=1e-5)
    words = ("--base", folder / "base", "--draft", "lookup", "--task", "prompts", "--num-prompts", 3)
    path = tmp_path / "record.json"
    code, _, _ = program(
        capsys, "sweep", *words, "--max-new-tokens", 10, "--out", tmp_path / "r", "--record", path, "--json"
    )
    assert code == 0
    recorded_texts = [row["output"] for row in json.loads(path.read_text("utf8"))["outputs"]]
    assert recorded_texts == [text for batch in texts[:2] for text in batch]


@pytest.mark.parametrize("lossy", [("--accept", "topn"), ("--temperature", "0.8")])
def test_settings_that_cannot_be_replayed_are_refused_before_the_target_is_recorded(shipped, tmp_path, capsys, lossy):
    words = ("--base", shipped / "base", "--draft", "lookup", "--task", "prompts", "--num-prompts", 1)
    path = tmp_path / "record.json"
    code, _, err = program(capsys, "sweep", *words, *lossy, "--out", tmp_path / "r", "--record", path)
    assert code == 2 and "a record replays greedy text under the exact rule" in err
    assert not path.exists()


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
    far = distance(base, prompts, texts)
    assert far.tokens == 6 and far.outside == 0 and far.nats == pytest.approx(nats, rel=1e-4)
    sampled = distance(base, prompts, texts, 0.7, 50)
    assert sampled.nats == pytest.approx(excess, rel=1e-3, abs=1e-3) and 0 < sampled.outside < 6
    # Under p itself the excess is 0 in the mean: summed over all tokens, each with its chance.
    p = (base(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(-1)
    every = [distance(base, [[5, 6, 7]], [[x]], 0.7).nats for x in range(97)]
    assert sum(chance * each for chance, each in zip(p.tolist(), every, strict=True)) == pytest.approx(0, abs=1e-4)
    assert max(every) > 1 and min(every) < -0.1


# ------------------------------------------------------------------------------------------------------------ replay


PROMPTS = [[5, 6, 7, 5, 6], [44], [9, 3, 2, 7, 5, 5, 9, 3]]


def drafters():
    base, small = tiny_llama(), tiny_llama(num_hidden_layers=3)
    drafts = [DraftModel(base), MaxGram(num_tokens=4)]
    return base, {
        "near": (DraftModel(base), comb(3, 2)), "far": (DraftModel(small), chain(4)),
        "lookup": (PromptLookup(width=2), comb(4, 2)), "maxgram": (MaxGram(), chain(5)),
        "cascade": (Cascade(drafts, [[3, 2], [0, 2]]), chain(8)), "auto": (AutoDrafter(), chain(5)),
    }  # fmt: skip


def test_a_replayed_record_is_reviewed_as_often_as_the_target_reviews_and_accepts_as_much(tmp_path):
    base, known = drafters()
    recorded.record(base, PROMPTS, 16).save(tmp_path / "r.json")
    record = recorded.Record.load(tmp_path / "r.json")
    for drafter, plan in known.values():
        real, own = [], []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = generate(
                base, ids, attention_mask=torch.ones_like(ids), draft=drafter, tree=plan, max_new_tokens=16,
                do_sample=False, return_dict_in_generate=True,
            )  # fmt: skip
            real += [(step.tokens, step.accepted, step.drafted) for step in out.steps]
            own.append(getattr(drafter, "reviews", ()))
            replayed = recorded.replay(record, prompt, drafter, plan, base.device)
            assert [(s.tokens, s.accepted, s.drafted) for s in replayed] == real[-len(out.steps) :]
        found = recorded.review(record, PROMPTS, drafter, plan, base.device)
        assert found["reviews"] == len(real) - len(PROMPTS)
        assert found["accepted"] == sum(accepted[0] for _, accepted, _ in real)
        assert found["draft_reviews"] == (recorded.sum_columns(own) if isinstance(drafter, Cascade) else None)


def test_the_target_does_not_decode_when_it_is_replayed(monkeypatch):
    base, known = drafters()
    record = recorded.record(base, PROMPTS[:1], 12)
    drafter, plan = known["lookup"]
    monkeypatch.setattr(base, "forward", None)
    assert recorded.review(record, PROMPTS[:1], drafter, plan, base.device)["tokens"] == 12


def test_what_a_record_cannot_replay_is_refused(tmp_path, model):
    base, known = drafters()
    record = recorded.record(base, PROMPTS[:1], 5)
    with pytest.raises(ValueError, match="not in the record"):
        list(recorded.replay(record, [1, 2], *known["lookup"], base.device))
    with pytest.raises(ValueError, match="from the target's features"):
        list(recorded.replay(record, PROMPTS[0], model.head, chain(2), base.device))
    with pytest.raises(ValueError, match="cannot draft for the recorded target"):
        list(recorded.replay(replace(record, start=1), PROMPTS[0], *known["near"], base.device))
    for text in ("[]", "{", '{"vocab_size": 5, "length": 1, "outputs": [{"prompt": [1], "output": [7]}]}'):
        (tmp_path / "bad.json").write_text(text, "utf8")
        with pytest.raises(ValueError, match=r"is no record of a target"):
            recorded.Record.load(tmp_path / "bad.json")


def test_a_record_of_another_target_or_of_shorter_texts_is_refused_and_a_longer_one_cut(
    shipped, tmp_path, capsys, hf_log
):
    path = tmp_path / "record.json"

    def ask(length, base=shipped / "base", out="out"):
        return program(
            capsys, "sweep", "--base", base, "--draft", "lookup", "--task", "prompts", "--num-prompts", 2,
            "--max-new-tokens", length, "--out", tmp_path / out, "--record", path, "--json",
        )  # fmt: skip

    tokens = [sum(row["tokens"] for row in json.loads(ask(n)[1])["rows"]) for n in (8, 4)]
    assert tokens[0] > tokens[1] > 0
    code, _, err = ask(9)
    assert code == 2 and "holds 8 tokens of each text, and 9 are asked for; delete or rename the file" in err
    shutil.copytree(shipped, tmp_path / "other")
    other = LlamaForCausalLM.from_pretrained(tmp_path / "other" / "base")
    torch.nn.init.normal_(other.lm_head.weight)
    other.save_pretrained(tmp_path / "other" / "base")
    code, _, err = ask(8, tmp_path / "other" / "base")
    assert code == 2 and "with other weights; delete or rename the file" in err and err.count("\n") == 1
    record = json.loads(path.read_text("utf8"))
    path.write_text(json.dumps({**record, "vocab_size": 300, "base": None}), "utf8")
    assert "with other vocab_size" in ask(8)[2]
    path.write_text(json.dumps({**record, "base": None}), "utf8")
    assert ask(8, out="new")[0] == 0 and "does not say which target it is of" in hf_log.text


# ----------------------------------------------------------------------------------------------------------- command


def test_the_command_writes_its_files_resumes_from_them_and_prints_json_alone(
    shipped, questions, tmp_path, cache_in_tmp, capsys, monkeypatch
):
    out = tmp_path / "out"
    ask = (
        "sweep", "--head", shipped / "eagle3", "--accept", "fuzzy:js", "--thresholds", "0.1,0.4", "--gamma", "2",
        "--task", "gsm8k", "--data", questions, "--max-new-tokens", 6, "--num-prompts", 2, "--out", out, "--no-plots",
    )  # fmt: skip
    code, text, _ = program(capsys, *ask, "--json")
    record = json.loads(text)
    assert code == 0 and [row["accept"] for row in record["rows"]] == [None, "exact", "fuzzy:js:0.1", "fuzzy:js:0.4"]
    assert sorted(path.name for path in out.iterdir()) == ["results.jsonl", "sweep.csv", "sweep.json", "sweep.md"]

    def never(*args, **kwargs):
        raise AssertionError("what is done is measured again")

    monkeypatch.setattr("specheads.bench.sweep.run.measure", never)
    code, text, err = program(capsys, *ask)
    assert code == 0 and "fuzzy:js:0.4" in text and "sweep.md" in text and "100%" in err


def test_a_cascade_is_swept_over_k_matrices_by_the_record_of_a_target(
    shipped, questions, tmp_path, cache_in_tmp, capsys
):
    ask = (
        "sweep", "--base", shipped / "base", "--draft", f"cascade:model:{shipped / 'base'}+maxgram",
        "--k-matrix", "[[3,2],[0,2]]", "--k-matrix", "[[1,1],[0,1]]", "--task", "gsm8k", "--data", questions,
        "--max-new-tokens", 12, "--num-prompts", 2, "--out", tmp_path / "out", "--record", tmp_path / "record.json",
    )  # fmt: skip
    code, text, _ = program(capsys, *ask, "--json")
    assert code == 0
    rows = json.loads(text)["rows"]
    assert [row["k_matrix"] for row in rows] == ["[[3, 2], [0, 2]]", "[[1, 1], [0, 1]]"]
    for row in rows:
        assert row["swi"] > 0 and row["draft_reviews"][0] > 0 and row["accepted"] > 0 and row["speed_up"] is None
    assert rows[0]["reviews"] < rows[1]["reviews"]
    assert "SWI" in program(capsys, *ask)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--head is missing"), (("--head", "nowhere"), "nowhere"),
        (("--head", "x", "--gamma", "2,x"), "--gamma x "),
        (("--draft", "lookup"), "which it is by --base"), (("absent.yaml",), "absent.yaml"),
        (("--head", "x", "--accept", "fuzy:1"), "did you mean 'fuzzy'"), (("--head", "x", "--task", "mmul"), "'mmlu'"),
        (("--head", "x", "--workers", "2", "--record", "r.json"), "leave --workers at 1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(words, said, capsys, tmp_path, offline):
    code, out, err = program(capsys, "sweep", *words, "--out", tmp_path)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1
