"""What ships works: the heads in checkpoints/ load without complaint, decode to the base's own text, and are small."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specheads
from specheads import SpecModel
from specheads.training.recipe.recipe import read_recipe
from tests.support.paths import ROOT

REPOSITORY = ROOT
CHECKPOINTS = REPOSITORY / "checkpoints"
HEADS = ("medusa", "hydra", "eagle", "eagle3", "parallel")
MEGABYTE = 10**6


@pytest.fixture(scope="module")
def shipped_base():
    """In float32: in bfloat16 a block of tokens may round apart from one token at a time."""
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "base", dtype=torch.float32)


@pytest.mark.parametrize("name", HEADS)
def test_a_shipped_head_fits_the_shipped_base_and_drafts_its_text(name, shipped_base, hf_log):
    model = SpecModel.from_pretrained(CHECKPOINTS / name, base=shipped_base)
    assert model.head.config.kind == name
    assert model.config.base_fingerprint["weights"], "nothing says which weights the head was trained for"
    assert not [record for record in hf_log.records if record.levelname in ("WARNING", "ERROR")]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "base")
    inputs = tokenizer("def fibonacci(n):\n    ", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    out = model.generate(**inputs, **options, return_dict_in_generate=True)
    assert torch.equal(out.sequences, shipped_base.generate(**inputs, **options))
    assert out.statistics()["accepted_length"] > 1.2, "an untrained head would accept hardly any draft"


@pytest.mark.parametrize("name", HEADS)
def test_a_shipped_head_finds_its_base_by_itself(name):
    assert SpecModel.from_pretrained(CHECKPOINTS / name).base.config.num_hidden_layers > 0


def test_the_shipped_draft_model_drafts_the_text_of_the_shipped_base(shipped_base):
    small = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "draft", dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(CHECKPOINTS / "draft")("def fibonacci(n):\n    ", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    out = specheads.generate(shipped_base, **inputs, **options, draft=specheads.DraftModel(small))
    plain = shipped_base.generate(**inputs, **options)
    assert torch.equal(out.sequences, plain.sequences) and out.statistics()["accepted_length"] > 1.2


@pytest.mark.parametrize(("name", "most"), [("base", 40), ("draft", 10), *((head, 15) for head in HEADS)])
def test_a_shipped_folder_is_small_and_has_a_card(name, most):
    folder = CHECKPOINTS / name
    assert 0 < sum(path.stat().st_size for path in folder.rglob("*")) <= most * MEGABYTE
    assert (folder / "README.md").read_text("utf8").strip()


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_an_export_of_a_shipped_head_says_what_to_expect_of_it(name, shipped_base, tmp_path):
    SpecModel.from_pretrained(CHECKPOINTS / name, base=shipped_base).export(tmp_path / "served", "vllm")
    said = re.search(r"greedy \| estimated .* (\d\.\d\d) \|", (tmp_path / "served" / "README.md").read_text("utf8"))
    assert said and f"| accepted length of the best chain, bonus token included | {said[1]} |" in (
        CHECKPOINTS / name / "README.md"
    ).read_text("utf8")


def test_the_recipes_of_the_shipped_heads_are_valid():
    recipes = {path.stem: read_recipe(path) for path in (REPOSITORY / "recipes" / "embedded").glob("*.yaml")}
    assert {*HEADS} <= {*recipes}
    for name, recipe in recipes.items():
        assert recipe.head is not None and recipe.head.kind == name
        assert (REPOSITORY / recipe.base / "config.json").is_file()
