"""Runs a decoder through whole conversations: each answer becomes context of the next question, for each decoder its
own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specheads.bench.queues import join_outputs
from specheads.bench.runner import Decoder, Output, Stopwatch
from specheads.data.conversation import Conversation
from specheads.decoding.generation import prompt_batches

CONVERSATIONS = (
    "conversations"  # the key of a batch under which its rows' conversations are, where any has a second turn
)


def live_rows(conversations: Sequence[Conversation | None], turn: int) -> list[int]:
    """The rows whose conversation has this turn, counted from 0."""
    return [i for i, one in enumerate(conversations) if turn < (1 if one is None else one.num_turns)]


def texts_of(batch: dict[str, Any]) -> list[int]:
    """The row of each text that a batch gives: the first turns of all rows, then the second ones of those that have
    one, and so on."""
    conversations = batch.get(CONVERSATIONS) or [None] * len(batch["input_ids"])
    most = max(1 if one is None else one.num_turns for one in conversations)
    return [row for turn in range(most) for row in live_rows(conversations, turn)]


def with_follow_ups(decode: Decoder, tokenizer: Any) -> Decoder:
    """A decoder of whole conversations. Its output has a text for each turn, in the order of `texts_of`."""

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        first = {name: values for name, values in batch.items() if name != CONVERSATIONS}
        conversations: list[Conversation] | None = batch.get(CONVERSATIONS)
        if conversations is None:
            return decode(first, watch)
        outputs = [decode(first, None)]
        answers = [[tokenizer.decode(row, skip_special_tokens=True)] for row in outputs[0].tokens]
        turn = 1
        while rows := live_rows(conversations, turn):
            prompts = [conversations[row].prompt(answers[row], tokenizer) for row in rows]
            asked: dict[str, Any] = {}
            for padded in prompt_batches.batches(tokenizer, prompts, first["input_ids"].device, len(rows)):
                asked |= padded
            for name in ("limits", "seeds"):
                if name in first:
                    asked[name] = [first[name][row] for row in rows]
            if "seeds" in first:
                asked["seeds"] = [seed ^ turn for seed in asked["seeds"]]
            outputs.append(decode(asked, None))
            for row, tokens in zip(rows, outputs[-1].tokens, strict=True):
                answers[row].append(tokenizer.decode(tokens, skip_special_tokens=True))
            turn += 1
        return replace(join_outputs(outputs), rows=len(conversations))

    return run
