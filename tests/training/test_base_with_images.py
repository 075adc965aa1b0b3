"""A recipe's base may be a model that reads images too, named by its folder: heads learn from rows of text."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from specheads import SpecModel
from specheads.cli import program as cli
from specheads.training.estimate import estimate
from specheads.training.parity import ParityConfig
from specheads.training.run import prepare
from tests.support.chat_base import write
from tests.support.saved_features import dump, material, recipe
from tests.support.tiny_models import tiny_llava

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows, and beside them a base that reads images, with the tokenizer of another."""
    made = material(tmp_path_factory.mktemp("material"))
    (made / "base" / "model.safetensors").unlink()
    tiny_llava(vocab_size=258, num_hidden_layers=4, eos_token_id=0, bos_token_id=0).save_pretrained(made / "base")
    return made


def test_a_run_trains_a_head_that_decodes_as_training_counted(folder, tmp_path):
    wanted = replace(recipe(folder, tmp_path, "eagle3", {"steps": 2}), parity=ParityConfig(prompts=2))
    run = prepare(wanted)
    metrics = run.train()  # which compares the two
    assert metrics["parity_measured"] >= 1
    head = run.trainer.model.head
    assert estimate(wanted).trained_parameters == sum(p.numel() for p in head.parameters())
    saved = SpecModel.from_pretrained(tmp_path)
    assert type(saved.base) is LlavaForConditionalGeneration
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in saved.head.state_dict().items())


def test_its_saved_features_train_the_same_head(folder, tmp_path):
    dump(folder, tmp_path / "saved")
    runs = [
        prepare(recipe(folder, tmp_path / name, features=features, max_steps=2))
        for name, features in (("live", None), ("kept", tmp_path / "saved"))
    ]
    live, kept = (run.train()["eval_loss"] for run in runs)
    assert live == pytest.approx(kept, rel=1e-5)


def test_it_answers_questions_in_its_own_words(folder, tmp_path):
    source, own = write(tmp_path / "rows.jsonl", [{"prompt": "a question"}]), tmp_path / "own.jsonl"
    options = ("--base", folder / "base", "--source", source, "--output", own, "--max_new_tokens", 8)
    assert cli.run(["distill", *map(str, options)]) == 0
    base = LlavaForConditionalGeneration.from_pretrained(folder / "base")
    prompt = AutoTokenizer.from_pretrained(folder / "base")("a question", return_tensors="pt").input_ids
    text = base.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)[0].tolist()
    assert f'"input_ids": {text}' in own.read_text("utf8")
