"""FSD's classes, its functions and its lists, and what patch() makes of its arguments."""

import json
import pickle

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.generation import utils

import specheads
from specheads import Fuzzy, chain, compat
from specheads.compat import fsd
from specheads.compat.fsd import FSDAutoModelForCausalLM
from specheads.compat.patch import draft_arguments
from tests.support.tiny_models import near, tiny_llama

IDS = torch.tensor([[5, 6, 7, 8]])
GREEDY = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft model that is often right, on disk."""
    base = tiny_llama(num_hidden_layers=2, eos_token_id=None)
    made = {}
    for name, model in {"large": base, "small": near(base)}.items():
        made[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(made[name])
    return made


def loaded(folders, kind=compat.FSDAutoModelForCausalLM):
    return [kind.from_pretrained(folders[name]) for name in ("large", "small")]


def test_their_readmes_example_runs_with_its_import_changed(folders):
    large_model_id, small_model_id, device0 = folders["large"], folders["small"], "cpu"
    input_ids = BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    # --- the example ---
    small_model = FSDAutoModelForCausalLM.from_pretrained(small_model_id, torch_dtype=torch.bfloat16).to(device0)
    large_model = FSDAutoModelForCausalLM.from_pretrained(large_model_id, torch_dtype=torch.bfloat16, device_map="auto")
    output = large_model.generate(
        **input_ids, assistant_model=small_model, fsd_div_threshold=0.4, fsd_div_type="js_div", max_new_tokens=25
    )
    # --- its end ---
    assert large_model.dtype == torch.bfloat16
    assert output.shape == (1, IDS.shape[1] + 25) and torch.equal(output[:, : IDS.shape[1]], IDS)
    assert sum(small_model.n_matches_list) and len(small_model.kl_divs) == sum(small_model.candidate_sequences_list)


@pytest.mark.parametrize("returns_dict", [None, True])
def test_a_generation_config_is_no_cause_for_a_warning_of_transformers(folders, monkeypatch, returns_dict):
    large, small = loaded(folders)
    config = GenerationConfig(**GREEDY, eos_token_id=2, pad_token_id=0, return_dict_in_generate=returns_dict)
    given = {"attention_mask": torch.ones_like(IDS), "assistant_model": small, "fsd_div_threshold": 0.4}
    warned = []
    monkeypatch.setattr(utils.logger, "warning_once", lambda text, *values: warned.append(text))
    out = large.generate(IDS, generation_config=config, **given)
    assert not warned and sum(small.n_matches_list)
    assert config.return_dict_in_generate is returns_dict
    assert isinstance(out, torch.Tensor) is not returns_dict


def test_what_their_csqa_script_prints_can_be_computed(folders):
    """Its arguments of generate(), over two questions, and its three averages."""
    model, small_model = loaded(folders)
    for question in (IDS, IDS.flip(1)):
        outputs = model.generate(
            input_ids=question, attention_mask=torch.ones_like(question), max_length=question.shape[1] + 30,
            do_sample=True, assistant_model=small_model, temperature=0.6, top_k=50, top_p=0.9, fsd_div_threshold=0.4,
            fsd_div_type="kl_div",
        )  # fmt: skip
        assert outputs.shape[1] == question.shape[1] + 30
    steps = len(small_model.n_matches_list)
    assert 0 < sum(small_model.n_matches_list) / steps <= sum(small_model.candidate_sequences_list) / steps <= 5
    assert 0 < sum(small_model.n_matches_list) / sum(small_model.totals_list) < 1


@pytest.mark.parametrize("threshold", [None, 0.05, 0.4])
def test_every_way_to_such_a_model_gives_the_same_text(folders, threshold):
    texts = []
    for kind in (compat.FSDAutoModelForCausalLM, fsd.FSDLlamaForCausalLM):
        large, small = loaded(folders, kind)
        asked = {**GREEDY, "assistant_model": small, "fsd_div_threshold": threshold, "fsd_div_type": "js_div"}
        texts.append(large.generate(IDS, **asked))
    large, small = loaded(folders, AutoModelForCausalLM)
    expected = large.generate(IDS, **GREEDY)
    with compat.patch_generation(large):
        texts.append(large.generate(IDS, **{**asked, "assistant_model": small}))
    assert torch.equal(large.generate(IDS, **GREEDY), expected)
    with specheads.patch(large):
        texts.append(large.generate(IDS, **{**asked, "assistant_model": small, "tree": chain(5)}))
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert torch.equal(texts[0], expected) == (threshold is None)


def test_their_other_readmes_way_to_mix_the_functions_in(folders):
    class Own(compat.FuzzyGenerationMixin, LlamaForCausalLM):
        pass

    large, small = loaded(folders, Own)
    expected = LlamaForCausalLM.from_pretrained(folders["large"]).generate(IDS, **GREEDY)
    assert torch.equal(large.generate(IDS, **GREEDY), expected)
    out = large.generate(IDS, **GREEDY, assistant_model=small, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and out.statistics()["drafted"]


@pytest.mark.parametrize(
    ("kind", "config", "plain"),
    [
        (fsd.FSDLlamaForCausalLM, LlamaConfig, LlamaForCausalLM),
        (fsd.FSDQwen2ForCausalLM, Qwen2Config, Qwen2ForCausalLM),
        (fsd.FSDGemma2ForCausalLM, Gemma2Config, Gemma2ForCausalLM),
    ],
    ids=lambda one: one.__qualname__,
)
def test_a_class_of_theirs_is_transformers_own_and_is_saved_as_that(kind, config, plain, tmp_path):
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    made = kind(config(**sizes)).eval()
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is plain and isinstance(made, plain)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [plain.__name__]
    expected = again.generate(IDS, **GREEDY)
    for model in (made, pickle.loads(pickle.dumps(made)), kind.from_pretrained(tmp_path)):
        assert type(model) is kind
        assert torch.equal(model.generate(IDS, **GREEDY), expected)
        assert torch.equal(model.generate(IDS, **GREEDY, assistant_model=again), expected)


def test_five_of_the_drafts_likeliest_tokens_are_drafted_unless_the_call_says_otherwise(folders):
    large, small = loaded(folders)
    asked = {"max_new_tokens": 24, "assistant_model": small, "fsd_div_threshold": 9.0, "return_dict_in_generate": True}
    out = large.generate(IDS, **asked, do_sample=True, top_k=0)  # whose warper would refuse a draft outside the 50
    assert {step.drafted[0] for step in out.steps[1:-1]} == {5}
    text = out.sequences[0].tolist()
    with torch.no_grad():
        best = small(out.sequences).logits[0].argmax(-1).tolist()
    start = IDS.shape[1] + 1  # the prefill's token; then five drafts and one of the target's own
    for begin in range(start, len(text) - 6, 6):
        assert text[begin : begin + 5] == best[begin - 1 : begin + 4]
    for more in ({"tree": chain(2)}, {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0}):
        out = large.generate(IDS, **asked, **more)
        assert max(step.drafted[0] for step in out.steps) == 2


def test_the_lists_count_as_their_code_does(folders):
    """The drafts accepted before the first rejection and the token drawn next, of the divergences the steps report."""
    large, small = loaded(folders)
    threshold = 0.05
    out = large.generate(
        IDS, **{**GREEDY, "max_new_tokens": 80}, assistant_model=small, fsd_div_threshold=threshold, fsd_tracking=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    matches, totals, near, beyond = [], [], [], 0
    for step in out.steps[1:]:
        rejected = [*(i for i, apart in enumerate(step.divergences[0]) if apart > threshold), step.drafted[0]]
        if step.drafted[0]:
            matches.append(min(rejected[0], len(step.tokens[0])))
            totals.append(min(rejected[0] + 1, len(step.tokens[0])))
            near.append(sum(apart <= threshold for apart in step.divergences[0]))
            beyond += any(apart <= threshold for apart in step.divergences[0][totals[-1] : step.accepted[0]])
    assert beyond, "steps that continue after the first rejection to drafts that are near again"
    assert small.n_matches_list == matches and small.totals_list == totals and small.theoretical_backoffs == near
    drafted = [step.drafted[0] for step in out.steps if step.drafted[0]]
    assert small.candidate_sequences_list == drafted
    assert small.n_discarded_list == [a - b for a, b in zip(drafted, matches, strict=True)]
    assert small.kl_divs == [apart for step in out.steps[1:] for apart in step.divergences[0]]
    assert out.statistics()["accepted"] > sum(matches)


def test_the_lists_grow_over_calls_without_a_threshold_and_row_by_row(folders):
    large, small = loaded(folders)
    for calls in (1, 2):
        out = large.generate(
            IDS.repeat(2, 1), **GREEDY, assistant_model=small, return_dict_in_generate=True,
            attention_mask=torch.ones(2, 4, dtype=torch.long),
        )  # fmt: skip
        assert out.lossless and small.kl_divs == []
        assert sum(small.n_matches_list) == calls * out.statistics()["accepted"]
        assert sum(small.candidate_sequences_list) == calls * out.statistics()["drafted"]
    plain = AutoModelForCausalLM.from_pretrained(folders["small"])
    large.generate(IDS, **GREEDY, assistant_model=plain, fsd_div_threshold=0.1)
    assert not hasattr(plain, "kl_divs")


def test_a_call_without_drafts_is_the_models_own(folders):
    large, _ = loaded(folders)
    expected = AutoModelForCausalLM.from_pretrained(folders["large"]).generate(IDS, **GREEDY)
    made = large.generate(IDS, **GREEDY, fsd_div_threshold=None, fsd_tracking=True, fsd_div_logit_processor=[])
    assert torch.equal(made, expected)


# --- What patch() makes of their arguments ---


def test_a_patched_model_gives_divergences_where_they_are_asked_for(folders):
    large, small = loaded(folders, AutoModelForCausalLM)
    call = {**GREEDY, "assistant_model": small, "fsd_div_threshold": 0.1, "return_dict_in_generate": True}
    with specheads.patch(large):
        made = [large.generate(IDS, **call, **more) for more in ({"output_divergences": True}, {"fsd_tracking": True})]
        assert not large.generate(IDS, **call).steps[1].divergences
        assert torch.is_tensor(large.generate(IDS, **{**call, "return_dict_in_generate": False}, fsd_tracking=True))
        exact = large.generate(IDS, **{**call, "fsd_div_threshold": None}, fsd_tracking=True)
        with pytest.raises(ValueError, match="output_divergences=True"):
            large.generate(IDS, **{**call, "fsd_div_threshold": None}, output_divergences=True)
    assert made[0].steps[1].divergences == made[1].steps[1].divergences and len(made[0].steps[1].divergences[0])
    assert exact.lossless and torch.equal(made[0].sequences, made[1].sequences)


def test_patch_takes_fsd_div_logit_processor():
    call = {"assistant_model": tiny_llama(num_hidden_layers=1), "fsd_div_threshold": 0.4, "fsd_div_type": "kl_div"}
    rule = draft_arguments({**call, "fsd_div_logit_processor": ["top_p", "temperature"]})["accept"]
    assert rule == Fuzzy(0.4, "kl", warpers="temperature+top_p", epsilon=1e-10)
    assert draft_arguments({**call, "fsd_div_logit_processor": []})["accept"] == Fuzzy(0.4, "kl")
    with pytest.raises(ValueError, match="'temp'"):
        draft_arguments({**call, "fsd_div_logit_processor": ["temp"]})
