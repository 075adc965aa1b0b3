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
from specheads.decoding.verify.model_inputs import image_arguments, row_positions
from specheads.heads.layers.rope import RotaryTable
from specheads.training.parity import ParityConfig, compare, prompts_of
from specheads.training.recipe import loading
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


# By which part of a position each frequency turns, beside images: time, height or width. Sections of 1, 1 and 2
# frequencies in a row, and interleaved; None: a position has one part.
AXES = {"Qwen2.5-VL": (0, 1, 2, 2), "Qwen3-VL": (0, 1, 2, 0)}


def plain_model(model, inputs, axes):
    """The model with a base whose pass is that of the row's own inputs, for the slow heads; place: of a token, as the
    base's decoder was given it."""
    seen = []
    decoder = model.base.model.language_model
    handle = decoder.register_forward_pre_hook(lambda *call: seen.append(call[2]["position_ids"]), with_kwargs=True)
    model.base(**inputs)
    handle.remove()
    position = seen[0]

    def place(at):
        if axes is None or position is None:  # a row of text
            return at
        length = position.shape[-1]
        parts = position[-3:, 0, min(at, length - 1)] + max(0, at - length + 1)
        return tuple(parts[list(axes)].tolist())

    class Base:
        get_input_embeddings = model.base.get_input_embeddings

        def __call__(self, ids, **options):
            assert ids.tolist() == inputs["input_ids"].tolist()
            return model.base(**inputs, **options)

    return SimpleNamespace(base=Base(), head=model.head, place=place)


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
        total += slow_eagle3(
            plain_model(model, inputs, AXES.get(family)), {**row, "input_ids": inputs["input_ids"][0].tolist()}
        )[0]
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


@pytest.mark.parametrize("family", AXES)
def test_a_head_turns_by_the_parts_of_a_position_that_its_base_turns_by(family, tmp_path):
    base = VISION[family]()[0]
    rotary = convert(base, "eagle3", rope_parameters=ROPE).head.rotary
    assert rotary.axes == AXES[family]
    like, position = torch.zeros(1), torch.randint(0, 40, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    rotary.ensure(64, like)
    expected = base.model.language_model.rotary_emb(like, position)
    for ours, theirs in zip(rotary(position), expected, strict=True):
        torch.testing.assert_close(ours.squeeze(1), theirs)
    convert(base, "eagle3").save_pretrained(tmp_path)
    assert SpecModel.from_pretrained(tmp_path, base=base).head.config.mrope_axes == AXES[family]
    assert convert(VISION["Llava"]()[0], "eagle3").head.config.mrope_axes is None


@pytest.mark.parametrize(("kind", "options"), [
    ("eagle3", {"steps": 3}), ("parallel", {"block_size": 3, "num_layers": 1}), ("hydra", {"prefix_layer": True}),
])  # fmt: skip
def test_after_an_image_decoding_accepts_what_training_says_of_a_head_with_the_bases_positions(
    kind, options, monkeypatch
):
    base, reader = VISION["Qwen2.5-VL"]()[0].double(), processor("Qwen2.5-VL")
    torch.manual_seed(0)
    model = convert(base, kind, dtype=torch.float64, **options).train()
    shown = chat((["a", *(picture(seed, 32, 32) for seed in range(4)), "b"], "c"))
    prompts = prompts_of(build_datasets(DataConfig(train=[shown]), reader, V)[0], ParityConfig(prompts=1))
    collator, rows = Collator(0, processor=reader), []
    for row in prompts:
        asked = collator([{**row, "labels": row["input_ids"]}])
        given = {name: asked[name] for name in ("input_ids", "attention_mask")} | image_arguments(base, asked)
        text = base.generate(**given, do_sample=False, max_new_tokens=24)[0].tolist()
        rows.append(
            {**row, "input_ids": text, "labels": [-100] * len(row["input_ids"]) + text[len(row["input_ids"]) :]}
        )
    batch, optimizer = collator(rows), torch.optim.Adam(model.head.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    config = ParityConfig(max_new_tokens=24)
    parity = compare(model, prompts, config, processor=reader)
    assert parity.measured == parity.simulated > 1.5, parity
    # What decoding rotates by: the base's positions of the prompt, and from its end on one more for each token.
    turned, forward = [], RotaryTable.forward
    monkeypatch.setattr(RotaryTable, "forward", lambda self, at: turned.append(at) or forward(self, at))
    model.generate(**given, draft="head", do_sample=False, max_new_tokens=12)
    table = row_positions(base, given["input_ids"], given["attention_mask"], image_arguments(base, asked)).table
    columns = turned[0].shape[-1]
    assert torch.equal(turned[0], table[..., :columns]) and columns >= table.shape[-1] - 1
    end, count = int(table[0, 0, -1]), table.shape[-1]
    later = torch.cat([at.flatten(1) for at in turned[1:]], 1)
    assert end <= count - 40 and later.min() >= end and later.max() <= end + 16 and bool((later == later[0]).all())


def material(made, family):
    """A base that reads images with its processor, and rows with files of images beside rows of text."""
    base = VISION[family]()[0]
    base.generation_config.eos_token_id = 1
    base.save_pretrained(made / "base")
    processor(family).save_pretrained(made / "base")
    for name, seeds in (("train", range(6)), ("eval", range(6, 10))):
        rows = []
        for seed in seeds:
            picture(seed).save(made / f"{seed}.png")
            part = [{"type": "image", "path": str(made / f"{seed}.png")}] if seed % 3 else []
            question = {"role": "user", "content": [*part, {"type": "text", "text": f"q{seed}"}]}
            rows.append({"messages": [question, {"role": "assistant", "content": f"answer {seed}"}]})
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return material(tmp_path_factory.mktemp("material"), "Llava")


def test_a_run_from_saved_features_has_the_positions_that_the_base_counts(tmp_path, monkeypatch):
    """As one with the base in memory. (AutoProcessor does not know the processor, a stand-in for Qwen's.)"""
    monkeypatch.setattr(loading, "load_processing", lambda name, config, **hub: processor("Qwen3-VL"))
    folder = material(tmp_path, "Qwen3-VL")
    options = {"steps": 2, "draft_vocab_size": None}
    live = prepare(recipe(folder, tmp_path / "live", "eagle3", options, {"max_length": 64}, max_steps=2))
    dump(folder, tmp_path / "saved", {"max_length": 64}, taps=None, training={"kind": "eagle3", "head": options})
    kept = prepare(recipe(folder, tmp_path / "kept", "eagle3", options, features=tmp_path / "saved", max_steps=2))
    assert kept.trainer.model.head.config.mrope_axes == AXES["Qwen3-VL"]
    assert any(bool((row["base_positions"][-1] < len(row["labels"]) - 1).all()) for row in kept.trainer.train_dataset)
    models, losses = [run.trainer.model.eval() for run in (live, kept)], []
    with torch.no_grad():
        for parameter in models[0].head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        models[1].head.load_state_dict(models[0].head.state_dict())
        for run, model in zip((live, kept), models, strict=True):
            rows = [run.trainer.train_dataset[i] for i in range(6)]
            losses.append(model(**run.trainer.data_collator(rows)).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_run_on_rows_with_images_trains_a_head_that_decodes_as_training_counted(folder, tmp_path, capsys):
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
    capsys.readouterr()  # commands read such rows as evaluation does
    options = [str(tmp_path / "live"), "--data", str(folder / "eval.jsonl"), "--json", "--device", "cpu"]
    assert cli.run(["parity", *options, "--prompts", "4", "--max-new-tokens", "12"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["measured"] == metrics["parity_measured"]
    assert cli.run(["calibrate", *options, "--max-length", "64"]) == 0
    learnt = [sum(label != -100 for label in row["labels"]) for row in run.trainer.eval_dataset]
    assert json.loads(capsys.readouterr().out)["positions"] == sum(learnt) - len(learnt)
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
