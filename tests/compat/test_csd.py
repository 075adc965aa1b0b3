"""specheads.compat.csd: its arguments, and the target's own greedy text whatever the cascade; and their counts."""

import json
import pickle

import pytest
import torch

from specheads import MaxGram, compat
from specheads.bench.compare.tasks import load_task
from tests.support.seq2seq_models import tiny_t5
from tests.support.tiny_models import near, tiny_llama

IDS = torch.tensor([[27, 42, 22, 85, 13, 36]])
NEW = 20


@pytest.fixture(scope="module")
def models():
    """Target, and two drafts, the larger nearer to it."""
    target = tiny_llama(num_hidden_layers=3)
    drafts = [compat.CSDraftingDecoderModel(near(target, noise), name=f"{noise}") for noise in (0.02, 0.05)]
    target.generation_config.update(repetition_penalty=1.9, do_sample=True)
    return compat.CSDraftingDecoderModel(target, name="llama", vocab_size=97), drafts


def greedy(target, **options):
    return target.generate(
        IDS, **{"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.0, "eos_token_id": 2, **options}
    )


@pytest.mark.parametrize("leniency", [1, 5])
@pytest.mark.parametrize(
    "k_matrix", [torch.tensor([[3, 2, 6], [0, 2, 6], [0, 0, 6]]), [[2, 1, 1], [0, 1, 1], [0, 0, 1]]]
)
@pytest.mark.sampled(3)
def test_a_cascade_writes_the_targets_own_text(models, k_matrix, leniency, tmp_path):
    target, drafts = models
    (tmp_path / "bigrams.json").write_text(str([0] * 97))
    mag = compat.get_mag_model(tmp_path / "bigrams.json", True)
    mag.cuda(0)
    out = compat.csd([*drafts, mag], target, IDS, IDS, k_matrix, max_length=NEW, leniency=leniency)
    assert torch.equal(out, greedy(target))


def test_the_text_ends_at_its_end_token_and_at_max_length(models):
    target, drafts = models
    plain = greedy(target)
    end = int(plain[0, IDS.shape[1] + 7])
    first = plain[0, IDS.shape[1] :].tolist().index(end)
    before, target.generation_config.eos_token_id = target.generation_config.eos_token_id, end
    out = compat.csd([drafts[0], MaxGram()], target, IDS, IDS, [[5, 10], [0, 10]], max_length=NEW)
    target.generation_config.eos_token_id = before
    assert torch.equal(out, plain[:, : IDS.shape[1] + first + 1])
    for length in (1, 3):
        out = compat.csd([drafts[0], MaxGram()], target, IDS, IDS, [[5, 10], [0, 10]], max_length=length)
        assert torch.equal(out, plain[:, : IDS.shape[1] + length])


def test_a_k_matrix_that_does_not_fit_is_refused(models):
    target, drafts = models
    with pytest.raises(ValueError, match="k-matrix has rows"):
        compat.csd([*drafts, MaxGram()], target, IDS, IDS, torch.tensor([[5, 10], [0, 10]]))
    with pytest.raises(ValueError, match="k-matrix has rows of 1, but 2 drafts need 2 × 2"):
        compat.csd([drafts[0], MaxGram()], target, IDS, IDS, "x")


def test_a_length_that_is_no_number_is_refused(models):
    target, drafts = models
    with pytest.raises(TypeError, match=r"^max_length='40' must be a whole number"):
        compat.csd([drafts[0], MaxGram()], target, IDS, IDS, torch.tensor([[5, 10], [0, 10]]), "40")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_list": MaxGram()}, "draft_list=MaxGram("), ({"target_model": "llama"}, "target_model='llama' must be"),
        ({"input_ids": [27, 42]}, "input_ids must be a tensor (1, T)"), ({"leniency": "x"}, "leniency='x' must be a "),
        ({"input_ids": IDS.repeat(2, 1)}, "not a tensor (2, 6)"),
    ],
    ids=range(5),
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_line(models, given, message):
    target, drafts = models
    usual = {"draft_list": [drafts[0], MaxGram()], "target_model": target, "initial_input": IDS, "input_ids": IDS}
    with pytest.raises((TypeError, ValueError)) as caught:
        compat.csd(**{**usual, "k_matrix": [[5, 10], [0, 10]], **given})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_source_that_is_no_tensor_is_refused(t5):
    with pytest.raises(TypeError, match=r"^initial_input must be a tensor \(1, T\)"):
        compat.csd([MaxGram()], t5[0], [27, 42], torch.tensor([[2]]), [[5]])


def calls(model):
    """How often the model's forward runs from now on, in a list that grows."""
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    return seen


@pytest.fixture
def t5():
    """A target and two drafts of FLAN-T5's kind, and a question; greedy text that ends by itself nowhere near NEW."""
    target = tiny_t5(seed=2, eos_token_id=1, decoder_start_token_id=0)
    target.generation_config.eos_token_id = 96
    return target, [near(target, 0.004), near(target, 0.01)], torch.tensor([[27, 42, 22, 85, 13, 36, 27, 1]])


def bigrams(folder, size=97):
    (folder / "bigrams.json").write_text(str([(token + 1) % size for token in range(size)]))
    return folder / "bigrams.json"


def test_forward_count_is_how_often_each_model_passed_over_its_text(t5, tmp_path):
    target, drafts, prompt = t5
    draft_list = [
        compat.CountedCSDraftingEncoderDecoderModel(model, False, name, "previous_work")
        for model, name in zip(drafts, ("google/flan-t5-base", "google/flan-t5-small"), strict=True)
    ]
    reviewer = compat.CountedCSDraftingEncoderDecoderModel(target, name="google/flan-t5-xxl")
    mag = compat.get_mag_model(bigrams(tmp_path), False)
    passes = [calls(model) for model in (target, *drafts)]
    start = torch.full((1, 1), reviewer.first_decode_id)
    for again in (1, 2):  # counts accumulate over the questions
        out = compat.csd([*draft_list, mag], reviewer, prompt, start, [[3, 2, 6], [0, 2, 6], [0, 0, 6]], NEW, 2)
        # The reading of the prompt is a review of the target, and part of the first one of a draft.
        counts = [reviewer.forward_count, *(draft.forward_count + again for draft in draft_list)]
        assert counts == [sum(seen) for seen in passes] and min(counts) > 1
    assert out[0, 0] == 0 and torch.equal(out, target.generate(prompt, max_new_tokens=NEW, do_sample=False))
    xxl, base, small = reviewer.forward_count, *(draft.forward_count for draft in draft_list)
    assert [model.calculate_time_cost() for model in (reviewer, *draft_list, mag)] == pytest.approx(
        [xxl * 11300, base * 0.04, small * 0.02, 0]
    )
    assert [reviewer.forward_count, reviewer.calculate_time_cost()] == [0, 0]


@pytest.mark.parametrize("kind", ["t5", "llama"])
@pytest.mark.sampled(2)
def test_their_main_runs_against_recorded_texts_as_against_the_target_itself(kind, t5, models, tmp_path):
    """What main.py does for each question: recorded target, counted drafts, MaG, total cost."""
    if kind == "t5":
        target, drafts, prompt = t5
        counted, cached = compat.CountedCSDraftingEncoderDecoderModel, compat.CountedCSDraftingCachedEncoderDecoderModel
    else:
        target, drafts, prompt = models[0].model, [draft.model for draft in models[1]], IDS
        counted, cached = compat.CountedCSDraftingDecoderModel, compat.CountedCSDraftingCachedDecoderModel
    config = {"k_matrix": [[3, 2, 6], [0, 2, 6], [0, 0, 6]], "lenience": 2, "counter_version": "model_parameters"}
    names = ("google/flan-t5-base", "google/flan-t5-small") if kind == "t5" else ("llama-160m", "llama-68m")
    plain = target.generate(
        prompt, max_new_tokens=60, do_sample=False, repetition_penalty=1.0, eos_token_id=96 if kind == "t5" else 2
    )
    recorded = tmp_path / "cache.json"
    recorded.write_text(json.dumps({"_".join(map(str, prompt[0].tolist())): "_".join(map(str, plain[0].tolist()))}))
    draft_list = [
        counted(model, sample=False, name=name, counter_version=config["counter_version"])
        for model, name in zip(drafts, names, strict=True)
    ]
    draft_list.append(compat.get_mag_model(bigrams(tmp_path), kind != "t5"))
    replayed = cached(
        compat.DummyModel(vocab_size=97), sample=False, name="google/flan-t5-xxl" if kind == "t5" else "llama_7b",
        cache_dir=str(recorded), counter_version=config["counter_version"],
    )  # fmt: skip
    live = counted(target, name=replayed.name)
    found = []
    for reviewer in (replayed, live):
        if isinstance(
            reviewer,
            (compat.CountedCSDraftingCachedEncoderDecoderModel, compat.CountedCSDraftingEncoderDecoderModel),
        ):
            ids = torch.full((1, 1), reviewer.first_decode_id, dtype=torch.long)
        else:
            ids = prompt
        k_matrix = torch.tensor(config["k_matrix"])
        out = compat.csd(draft_list, reviewer, prompt, ids, k_matrix, 60, leniency=config["lenience"])
        spent = [m.calculate_time_cost() for m in draft_list if not isinstance(m, compat.CSDraftingMaGModel)]
        found.append([out.tolist(), *spent, reviewer.calculate_time_cost()])
    assert found[0] == found[1] and found[0][0] == plain.tolist() and min(found[0][1:]) > 0
    assert found[0][-1] % (11300 if kind == "t5" else 7000) == 0
    short = compat.csd(draft_list, replayed, prompt, ids, k_matrix, 7)
    assert torch.equal(short, plain[:, : ids.shape[1] + 7])
    with pytest.raises(ValueError, match="a prompt of 1 tokens is not recorded"):
        compat.csd(draft_list, replayed, torch.tensor([[5]]), ids, k_matrix)


def test_their_names_costs_and_devices_are_there():
    llama = tiny_llama(num_hidden_layers=1)
    for kind in (compat.CSDraftingDecoderModelKVCache, compat.CountedCSDraftingDecoderModelKVCache):
        model = kind(llama, name="JackFram/llama-160m", vocab_size=32000)
        assert isinstance(model, compat.CSDraftingDecoderModel) and isinstance(model, compat.CSDraftingModel)
        assert model.vocab_size == 97 and model.device == llama.device and model.to("cpu").cpu().model is llama
        assert model.config is llama.config and pickle.loads(pickle.dumps(model)).name == model.name
    cost = [
        compat.CountedCSDraftingDecoderModel(llama, False, name, version).time_cost
        for name, version in (
            ("JackFram/llama-68m", "model_parameters"), ("JackFram/llama-160m", "model_parameters"),
            ("llama_7b", "model_parameters"), ("llama", "model_parameters"), ("google/flan-t5-xl", "model_parameters"),
            ("google/flan-t5-large", "previous_work"), ("other", "model_parameters"),
        )
    ]  # fmt: skip
    assert cost == [68, 160, 7000, 7000, 3000, 0.11, 0]
    with pytest.raises(ValueError, match="did you mean 'previous_work'"):
        compat.CountedCSDraftingDecoderModel(llama, False, "llama", "previous_works")
    with pytest.raises(ValueError, match="sample=True"):
        compat.CSDraftingDecoderModel(llama, True)
    with pytest.raises(AttributeError, match="review"):
        compat.CSDraftingDecoderModel(llama).review(None)
    mag = compat.CSDraftingMaGModel(torch.arange(97), name="mag")
    assert mag.bigrams == tuple(range(97)) and mag.name == "mag" and mag.to(0).cpu().device == torch.device("cpu")


def test_their_rows_and_prompts_are_those_of_bench(tmp_path, cache_in_tmp):
    ours = {"question": "Two plus two?", "choices": ["3", "4", "5", "6"], "answer": 1}
    theirs = {"input": "Two plus two?", "A": "3", "B": "4", "C": "5", "D": "6", "target": "B"}
    for number, row in enumerate((ours, theirs)):
        (tmp_path / f"{number}.json").write_text(json.dumps([row]))
        assert compat.get_test_set("sampled_mmlu", str(tmp_path / f"{number}.json")) == [theirs]
        assert (
            compat.format_initial_input(row, "sampled_mmlu")
            == load_task(f"mmlu:{tmp_path / f'{number}.json'}", None).questions[0].prompt
        )
    without_answer = {name: text for name, text in theirs.items() if name != "target"}
    assert compat.format_initial_input(without_answer, "mmlu") == compat.format_initial_input(theirs, "mmlu")
    row = {"question": "Tom has 3 and 4", "answer": "#### 7"}
    (tmp_path / "gsm8k.json").write_text(json.dumps({"test": [row]}))
    assert compat.get_test_set("gsm8k", [str(tmp_path / "gsm8k.json")]) == [row]
    assert compat.format_initial_input(row, "gsm8k") == (
        "Reason the math question below step by step. Question: Tom has 3 and 4.\n Answer: "
    )
    with pytest.raises(ValueError, match="none of gsm8k"):
        compat.format_initial_input(row, "csqa")
