"""What generate() warns of, once: a text that passes what its base was made for or its head was trained on, and a slow
dtype."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import specheads
from specheads import CheckpointError, DraftModel, SpecModel, convert
from specheads.data.batches import Collator, pack
from specheads.decoding.generation.warnings import base_length, logger
from specheads.training.trainer.trainer import longest_text
from tests.support.families import build
from tests.support.seq2seq_models import tiny_t5
from tests.support.tiny_models import tiny_llama
from tests.support.trainers import model_of, rows, trainer_of

HEADS = {
    "eagle3": True,
    "eagle": True,
    "mtp": True,
    "parallel": True,
    "medusa": False,
    "hydra": True,
}  # those that attend


@pytest.fixture(autouse=True)
def nothing_said_yet():
    type(logger).warning_once.cache_clear()


def said(log):
    return [record.message for record in log.records if record.message.startswith("position ")]


def ids(length, rows=1):
    return torch.arange(3, 3 + length).repeat(rows, 1)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.sampled(2)
def test_a_text_longer_than_those_the_head_was_trained_on_is_said_once(kind, hf_log):
    model = model_of(kind)
    model.note_trained_length(12)
    options = {"max_length": 13, "do_sample": False, "eos_token_id": None}
    model.generate(ids(6), **options)  # of 13 tokens the last is not fed
    model.generate(ids(6), **{**options, "max_length": 40}, draft=False)  # no head, no limit of one
    assert said(hf_log) == []
    for _ in range(2):
        model.generate(ids(6), **{**options, "max_length": 14})
    expected = ["position 13 is past the 12 tokens that this head was trained on"] if HEADS[kind] else []
    assert [line.partition(":")[0] for line in said(hf_log)] == expected


def test_padding_is_no_text(hf_log):
    model = model_of("eagle3")
    model.note_trained_length(12)
    mask = torch.tensor([[0] * 6 + [1] * 4, [1] * 10])
    asked = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    model.generate(ids(10, 2), **asked)
    model.generate(ids(10, 2), **{**asked, "max_new_tokens": 6, "attention_mask": mask[:1].repeat(2, 1)})
    assert said(hf_log) == []


def test_a_prompt_that_is_too_long_is_said_before_anything_is_decoded(hf_log):
    model = model_of("eagle3")
    model.note_trained_length(4)
    seen = []
    stop = lambda ids, scores: seen.append(len(said(hf_log))) or torch.ones(len(ids), dtype=torch.bool)  # noqa: E731
    model.generate(ids(9), max_new_tokens=2, stopping_criteria=[stop])
    assert seen == [1]


def test_so_is_a_text_longer_than_its_base_was_made_for(hf_log):
    base = tiny_llama(max_position_embeddings=16)
    for length in (17, 18, 20):
        specheads.generate(base, ids(6), draft=DraftModel(base), max_length=length, eos_token_id=None)
    assert [line.partition(" was made for")[0] for line in said(hf_log)] == [
        "position 17 is past the 16 tokens that LlamaForCausalLM"
    ]


def test_positions_that_stretch_with_the_text_have_no_such_limit():
    for rope, length in [({"rope_type": "default"}, 512), ({"rope_type": "dynamic", "factor": 2.0}, None),
     ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512)]:  # fmt: skip
        assert base_length(tiny_llama(rope_parameters={"rope_theta": 10000.0, **rope})) == length


def test_bases_without_positions_have_no_limit_either():
    assert base_length(build("GPT2Config", {"n_positions": 40, "max_position_embeddings": 40})) == 40
    assert base_length(tiny_t5()) is None


def test_training_tells_the_head_how_long_its_texts_were(tmp_path, hf_log):
    trainer = trainer_of(tmp_path, data=rows(12, lengths=(4, 14)), num_train_epochs=1, max_steps=-1)
    trainer.train()
    longest = max(len(row["input_ids"]) for row in rows(12, lengths=(4, 14)))
    assert trainer.model.config.trained_length == trainer.model.head.trained_length == longest
    trainer.model.eval().generate(ids(6), max_length=longest + 2, do_sample=False, eos_token_id=None)
    assert len(said(hf_log)) == 1


def test_of_packed_rows_the_longest_document_counts():
    made = [{"input_ids": [5] * n, "labels": [5] * n} for n in (3, 7, 4, 2)]
    batch = Collator(0)(pack(made, 10))
    assert batch["input_ids"].shape[1] == 10 and int(longest_text(batch)) == 7
    assert int(longest_text(Collator(0)(made))) == 7
    assert int(longest_text({"input_ids": torch.zeros(2, 5)})) == 5


def test_a_checkpoint_keeps_it_and_a_run_resumed_with_shorter_rows_too(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer_of(tmp_path, data=rows(4, lengths=(12, 13)), **options).train()
    assert json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())["trained_length"] == 12
    shorter = {**options, "max_steps": 3, "ignore_data_skip": True}
    again = trainer_of(tmp_path, data=rows(4, lengths=(5, 6)), **shorter)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.model.config.trained_length == 12


def test_it_is_restored_with_the_head_and_not_known_of_older_files(named, tmp_path):
    model = convert(named, "eagle3")
    model.save_pretrained(tmp_path / "untrained")
    assert SpecModel.from_pretrained(tmp_path / "untrained").head.trained_length is None
    model.note_trained_length(64)
    model.save_pretrained(tmp_path / "new")
    assert SpecModel.from_pretrained(tmp_path / "new").head.trained_length == 64
    weights = tmp_path / "new" / "model.safetensors"  # its header counts, not config.json
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
    stored = json.loads(metadata["specheads_config"])
    assert stored.pop("trained_length") == 64
    save_file(load_file(weights), weights, metadata={**metadata, "specheads_config": json.dumps(stored)})
    config = weights.with_name("config.json")
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "trained_length"}))
    assert SpecModel.from_pretrained(weights.parent).head.trained_length is None


@pytest.mark.parametrize("value", [0, -1, "64", 1.5, True, 2**70, [3]])
def test_a_file_that_makes_no_sense_of_it_is_refused(value, named, tmp_path):
    model = convert(named, "eagle3")
    model.config.trained_length = value
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="trained_length must be a whole number of tokens"):
        SpecModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(("is_fast", "dtype", "draft", "times"), [
    (False, torch.bfloat16, "lookup", 1), (True, torch.bfloat16, "lookup", 0), (False, torch.float32, "lookup", 0),
    (False, torch.bfloat16, False, 0),
])  # fmt: skip
def test_drafts_for_a_base_in_bfloat16_where_that_is_slow(is_fast, dtype, draft, times, hf_log, monkeypatch):
    monkeypatch.setattr("specheads.decoding.generation.warnings.bfloat16_is_fast", lambda device: is_fast)
    base = tiny_llama().to(dtype)
    for _ in range(2):
        specheads.generate(base, ids(4), draft=draft, max_new_tokens=3, do_sample=False)
    warned = [record.message for record in hf_log.records if "bfloat16" in record.message]
    assert len(warned) == times and all("dtype=torch.float32" in message for message in warned)
