"""Claims about conversations of several turns in specheads bench: each decoder's own answers are its context."""

import pytest
import torch

from specheads.bench.batches import CONVERSATIONS, texts_of, with_follow_ups
from specheads.bench.compare import run
from specheads.bench.compare.decoder_spec import BenchSetup
from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.prompt_sets import encode
from specheads.bench.prompts import Prompt
from specheads.bench.runner import Output
from specheads.data.conversation import Conversation
from specheads.models.named import Models
from tests.support.chat_tokenizer import CHATML, build_tokenizer


def asked(*questions):
    return Conversation.from_messages([{"role": "user", "content": text} for text in questions])


@pytest.fixture
def setup(shipped):
    models = Models.load(str(shipped / "base"))
    models.tokenizer.chat_template = CHATML
    return BenchSetup(models, shipped, 4, 80, {})


def test_each_answer_is_context_of_the_next_question():
    tokenizer, seen = build_tokenizer(CHATML), []
    answers = iter(["first one", "one", "again", "last"])

    def decode(batch, watch):
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        seen.append(([tokenizer.decode(row) for row in rows], batch["limits"], batch["seeds"]))
        tokens = [tokenizer(next(answers))["input_ids"] for _ in rows]
        return Output(tokens, {"steps": 2}, [[1] * len(row) for row in tokens], {"draft": 1.0})

    talks = [asked("a", "b", "c"), asked("alone")]
    found = encode("p", [Prompt(talks[0], "math"), Prompt(talks[1])], tokenizer)
    width = max(map(len, found.ids))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in found.ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in found.ids])
    batch = {
        "input_ids": ids, "attention_mask": mask, "limits": [7, 8], "seeds": [12, 30], CONVERSATIONS: talks
    }  # fmt: skip
    output = with_follow_ups(decode, tokenizer)(batch, None)
    assert texts_of(batch) == [0, 1, 0, 0] and output.rows == 2
    assert [tokenizer.decode(row) for row in output.tokens] == ["first one", "one", "again", "last"]
    assert output.statistics == {"steps": 6} and output.parts == {"draft": 3.0}
    texts = [texts for texts, _, _ in seen]
    history = talks[0].messages(["first one", "again"])
    assert texts[2] == [tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)]
    assert [limits for _, limits, _ in seen] == [[7, 8], [7], [7]]
    assert seen[0][2] == [12, 30] and len({12, *seen[1][2], *seen[2][2]}) == 3, "a seed of its own for each turn"
    # The last question comes after everything before it, with answers of up to four tokens.
    long = tokenizer.apply_chat_template(talks[0].messages(["", ""]), tokenize=True, add_generation_prompt=True)
    assert found.longest(4) == len(long["input_ids"]) + 8


@pytest.mark.parametrize("batch", [1, 2])
def test_all_decoders_write_the_same_conversations(setup, tmp_path, batch):
    prompts = [Prompt(asked("one two", "three"), "talk"), Prompt(asked("four")), Prompt("plain", "text")]
    found = encode("p", prompts, setup.models.tokenizer)
    assert "4 texts" in found.note
    options = BenchOptions(
        decoder=("transformers", "plain", "eagle3"), batch=batch, temperature=(0, 1), max_new_tokens=4, repeats=1,
        out=tmp_path,
    )  # fmt: skip
    specs = run.decoders_of(options)
    outcome = run.run(options, setup, specs, [found], lambda part, name: None)
    greedy = [one for one in outcome.rounds if one["temperature"] == 0]
    rows = [row for one in greedy for row in one["categories"]]
    assert sorted(rows, key=str) == [None, "talk", "talk", "text"]
    for one in outcome.rounds:
        for name, sample in one["decoders"].items():
            assert len(sample["tokens"]) == len(one["categories"]), name
            assert one["temperature"] or sample["differs_at"] == [None] * len(sample["tokens"])
    assert run.run(options, setup, specs, [found], lambda part, name: None).rounds == outcome.rounds, "resumed"
