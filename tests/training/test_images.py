"""Rows with images train heads as rows of text do: through the base's processor, and through its own forward."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specheads import SpecModel, SpecTrainer, SpecTrainingArguments, convert
from specheads.cli import program as cli
from specheads.data.batches import Collator
from specheads.data.config import DataConfig
from specheads.data.conversation import Conversation
from specheads.data.datasets import build_datasets
from specheads.data.images import TYPES, NoImages, token_types
from specheads.decoding.verify.model_inputs import image_arguments
from specheads.training.parity import ParityConfig
from specheads.training.run import prepare
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import question
from tests.reference.slow_heads import slow_eagle3, spec_model
from tests.support.saved_features import dump, recipe
from tests.support.vision import IMAGE_TOKENS, VISION, V, chat, picture, processor

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
CHATS = [
    chat((["l ", picture(1, 24, 16), " h"], "a c")),
    chat((["p"], "text")),
    chat((["x", picture(2), picture(3), "y"], "2"), ([picture(4), "z"], "one")),
]


GREEDY = {"do_sample": False, "max_new_tokens": 10}


def plain_inputs(reader, messages, base, prompt=False, dtype=torch.float64):
    """What transformers' own processor makes of a chat, for the base alone."""
    listed = [
        {**m, "content": [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]}
        for m in messages
    ]
    out = reader.apply_chat_template(
        listed, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=prompt
    )
    dropped = set() if "Qwen" in type(base).__name__ else {"mm_token_type_ids"}
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in out.items() if k not in dropped}


def plain_model(model, inputs):
    """The model with a base whose pass is that of the row's own inputs, for the slow heads."""

    class Base:
        get_input_embeddings = model.base.get_input_embeddings

        def __call__(self, ids, **options):
            assert ids.tolist() == inputs["input_ids"].tolist()
            return model.base(**inputs, **options)

    return SimpleNamespace(base=Base(), head=model.head)


@pytest.mark.parametrize("family", IMAGE_TOKENS)
def test_loss_and_gradients_of_rows_with_images_are_those_of_each_row_alone(family):
    base, reader = VISION[family]()[0].double(), processor(family)
    model = spec_model("eagle3", base, rope_parameters=ROPE)
    data, _ = build_datasets(DataConfig(train=CHATS), reader, V)
    plain = [plain_inputs(reader, asked["messages"], base) for asked in CHATS]
    likeliest = torch.cat([base(**inputs).logits.argmax(-1)[0] for inputs in plain])
    model.head.set_draft_vocabulary(torch.bincount(likeliest, minlength=V), base)
    assert [sum(row[TYPES]) > 0 for row in data] == [True, False, True] and len(data[2]["images"]) == 3
    batch = Collator(0, processor=reader)([data[i] for i in range(3)])
    assert not ((batch["labels"] != -100) & (batch[TYPES] > 0)).any()
    loss = model.train()(**batch).loss
    trained = [p for p in model.head.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, trained)
    total, tokens = 0.0, 0
    for row, asked, inputs in zip(data, CHATS, plain, strict=True):
        learnt = [label for label in row["labels"] if label != -100]
        answers = [m["content"] for m in asked["messages"] if m["role"] == "assistant"]
        assert reader.tokenizer.decode(learnt) == "".join(f"{answer}<eos>" for answer in answers)
        total += slow_eagle3(plain_model(model, inputs), {**row, "input_ids": inputs["input_ids"][0].tolist()})[0]
        tokens += len(learnt)
    assert loss.item() == pytest.approx((total / tokens).item(), rel=1e-6)
    for fast, slow in zip(grads, torch.autograd.grad(total / tokens, trained), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5 * max(1.0, float(slow.abs().max())))
    # And what decoding makes of a row: with drafts the text is transformers' own.
    asked = CHATS[2]["messages"][:3]
    expected = base.generate(**plain_inputs(reader, asked, base, prompt=True), **GREEDY)
    ids = Conversation.from_messages(asked, images=[]).prompt(["2"], reader)
    row = {"input_ids": ids, "labels": ids, "images": data[2]["images"], TYPES: token_types(reader, ids)}
    batch = Collator(0, processor=reader)([row])
    given = {"attention_mask": batch["attention_mask"], **image_arguments(base, batch)}
    out = model.generate(batch["input_ids"], draft="head", return_dict_in_generate=True, **given, **GREEDY)
    assert torch.equal(out.sequences, expected) and out.statistics()["drafted"] > 0
    without = {"attention_mask": batch["attention_mask"]}
    assert not torch.equal(expected, base.generate(batch["input_ids"], **without, **GREEDY))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base that reads images with its processor, and rows with files of images beside rows of text."""
    made = tmp_path_factory.mktemp("material")
    base = VISION["Llava"]()[0]
    base.generation_config.eos_token_id = 1
    base.save_pretrained(made / "base")
    processor("Llava").save_pretrained(made / "base")
    for name, seeds in (("train", range(6)), ("eval", range(6, 10))):
        rows = []
        for seed in seeds:
            picture(seed).save(made / f"{seed}.png")
            part = [{"type": "image", "path": str(made / f"{seed}.png")}] if seed % 3 else []
            question = {"role": "user", "content": [*part, {"type": "text", "text": f"q{seed}"}]}
            rows.append({"messages": [question, {"role": "assistant", "content": f"answer {seed}"}]})
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_a_run_on_rows_with_images_trains_a_head_that_decodes_as_training_counted(folder, tmp_path):
    """From the base in memory and from its saved features alike."""
    data = {"max_length": 64}
    wanted = recipe(folder, tmp_path / "live", "eagle3", {"steps": 2}, data, per_device_eval_batch_size=3)
    run = prepare(replace(wanted, parity=ParityConfig(prompts=4, max_new_tokens=12)))
    metrics = run.train()
    assert metrics["parity_measured"] >= 1 and metrics["eval_rows"] == 4
    dump(folder, tmp_path / "saved", data, taps=None, training={"kind": "eagle3", "head": {"steps": 2}})
    kept = prepare(recipe(folder, tmp_path / "kept", "eagle3", {"steps": 2}, features=tmp_path / "saved"))
    assert kept.train()["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5)
    head = run.trainer.model.head.state_dict()
    saved = SpecModel.from_pretrained(tmp_path / "live")
    assert all(torch.equal(tensor, head[name]) for name, tensor in saved.head.state_dict().items())
    told = (convert(saved.base, "medusa").export(tmp_path / "served", "vllm") / "README.md").read_text("utf8")
    assert "This export is a head for text." in told


def test_a_trainer_takes_chats_with_images_and_a_processor(tmp_path):
    """As TRL's do: nothing is removed from the rows before the collator has read their images."""
    model, reader = convert(VISION["Gemma-3"]()[0], "medusa", num_heads=2), processor("Gemma-3")
    arguments = SpecTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = SpecTrainer(model, arguments, train_dataset=CHATS, eval_dataset=CHATS[:2], processing_class=reader)
    assert trainer.data_collator([trainer.train_dataset[2]])["pixel_values"].shape == (3, 3, 16, 16)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    rows = [trainer.eval_dataset[i] for i in range(2)]
    assert loss == pytest.approx(model(**trainer.data_collator(rows)).loss.item(), rel=1e-4)


def test_a_base_answers_questions_about_images_in_its_own_words(folder, tmp_path):
    own = tmp_path / "own.jsonl"
    options = ("--base", folder / "base", "--source", folder / "train.jsonl", "--output", own, "--max_new_tokens", 6)
    assert cli.run(["distill", *map(str, options)]) == 0
    base, reader = VISION["Llava"]()[0], processor("Llava")
    answered = sorted(
        (json.loads(line) for line in own.read_text("utf8").splitlines()), key=lambda row: row["input_ids"]
    )
    expected = []
    for line in (folder / "train.jsonl").read_text("utf8").splitlines():
        inputs = plain_inputs(reader, json.loads(line)["messages"][:1], base, prompt=True, dtype=torch.float32)
        expected.append(base.generate(**inputs, do_sample=False, max_new_tokens=6, eos_token_id=1)[0].tolist())
    assert [row["input_ids"] for row in answered] == sorted(expected)
    assert sum("images" in row for row in answered) == 4
    rows = build_datasets(DataConfig(train=str(own)), reader, V)[0]
    assert len(rows) == 6 and sum(map(bool, rows["images"])) == 4
    served = Options(base="b", output="o", server=("http://127.0.0.1:9/v1",))
    with pytest.raises(NoImages, match="--server answers text alone"):
        question(CHATS[0], reader, served)
