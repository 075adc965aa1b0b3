"""Answers by the base itself: for each temperature a batch, whose finished rows take the next questions. Questions with
images are answered one at a time."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from specheads.data.batches import Collator
from specheads.data.images import TYPES, ImageCut, token_types, tokenizer_of
from specheads.data.row_forms import RowError
from specheads.data.rows import Row, truncate
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.many import Continuation, generate_many
from specheads.decoding.verify.model_inputs import image_arguments
from specheads.hub import hub_options
from specheads.models.base.loading import load_language_model
from specheads.options import OptionError
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import Ask
from specheads.training.self_distill.rows_file import RowsFile

AHEAD = 4  # batches of questions asked after the oldest unanswered one


def load(options: Options) -> Any:
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    base: Any = load_language_model(options.base, dtype=dtype, **hub_options(options.base))
    return base.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompt_room(config: Any, options: Options) -> int:
    """The most tokens that a prompt may have, leaving room for its answer."""
    room = min(options.max_length, getattr(config, "max_position_embeddings", None) or options.max_length)
    if room <= options.max_new_tokens:
        raise OptionError(
            f"{{max_new_tokens}}: the base takes {room} tokens, prompt included", max_new_tokens=options.max_new_tokens
        )
    return room - options.max_new_tokens


def cut_prompt(ids: list[int], room: int, tokenizer: Any) -> list[int]:
    """The end of a prompt that is too long."""
    return truncate({"input_ids": ids, "labels": ids}, room, tokenizer)["input_ids"]


@dataclass
class _Talk:
    """A question, the number of its first answer among all, and its answers so far: rows, or why there is none."""

    ask: Ask
    first: int
    results: list[Row | str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        return len(self.results) == self.ask.num_turns

    def refuse(self, why: str) -> None:
        """Leave out this turn and those after it."""
        self.results += [why] * (self.ask.num_turns - len(self.results))


class _Lane:
    """The questions of one temperature: those whose next turn waits, and the batch that answers them.

    next_talk: gives a new question of this temperature, or None if there is none (for now). answered: called with a
    talk whose last answer has come.
    """

    def __init__(
        self, base: Any, processing: Any, options: Options, temperature: float, next_talk: Callable[[], _Talk | None],
        answered: Callable[[_Talk], None],
    ) -> None:  # fmt: skip
        self.base, self.processing, self.options = base, processing, options
        self.tokenizer = tokenizer_of(processing)
        self.sampling: dict[str, Any] = {**options.sampling(temperature)}
        self.room, self.next_talk = prompt_room(base.config, options), next_talk
        self.answered = answered
        self.waiting: deque[_Talk] = deque()
        self.with_images: deque[tuple[_Talk, list[int]]] = deque()  # asked, with their prompts
        self.asked: list[_Talk] = []  # by the index of the prompt
        self.batch: Iterator[Continuation] = iter(())

    def answer_one(self) -> int:
        """Have the batch finish another text, or answer a question with images. The answer's tokens; 0 if no question
        could be asked."""
        if self.with_images:
            return self._answer_with_images()
        result = next(self.batch, None)
        if result is None:  # the rows ended before follow-up questions came, or nothing has begun
            self.batch = self._begin()
            if (result := next(self.batch, None)) is None:
                return self._answer_with_images() if self.with_images else 0
        return self._note(self.asked[result.index], result.prompt, result.tokens)

    def _note(self, talk: _Talk, prompt: list[int], tokens: list[int]) -> int:
        talk.results.append(talk.ask.row(prompt, tokens, talk.ask.question.shown(talk.answers)))
        talk.answers.append(self.tokenizer.decode(tokens, skip_special_tokens=True))
        if talk.is_answered:
            self.answered(talk)
        else:
            self.waiting.append(talk)
        return len(tokens)

    def _begin(self) -> Iterator[Continuation]:
        self.asked = []
        seed = self._seed if self.sampling else None
        options = {**self._decoding(), "batch_size": self.options.batch_size, "seed": seed}
        return iter(generate_many(self.base, self._prompts(), stream=True, **options))

    def _decoding(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.options.max_new_tokens, "pad_token_id": self.tokenizer.pad_token_id or 0,
            "do_sample": bool(self.sampling), **self.sampling,
        }  # fmt: skip

    def _answer_with_images(self) -> int:
        talk, prompt = self.with_images.popleft()
        row = {
            "input_ids": prompt, "labels": prompt, "images": talk.ask.question.shown(talk.answers),
            TYPES: token_types(self.processing, prompt),
        }  # fmt: skip
        batch = Collator(0, processor=self.processing)([row])
        ids, mask = (batch[name].to(self.base.device) for name in ("input_ids", "attention_mask"))
        seed = self._seed_of(talk) if self.sampling else None
        given = image_arguments(self.base, batch)
        text: Any = generate(self.base, ids, attention_mask=mask, seed=seed, **given, **self._decoding())
        return self._note(talk, prompt, text[0, len(prompt) :].tolist())

    def _prompts(self) -> Iterator[list[int]]:
        """The next turns of questions, follow-ups first."""
        while (talk := self.waiting.popleft() if self.waiting else self.next_talk()) is not None:
            try:
                ids = talk.ask.question.prompt(talk.answers, self.processing)
                pictured = bool(talk.ask.question.shown(talk.answers))
                if pictured and len(ids) > self.room:
                    raise ImageCut(f"its {len(ids)} tokens with images leave no room for an answer: raise max_length")
            except RowError as error:
                talk.refuse(str(error))
                continue
            if pictured:
                self.with_images.append((talk, ids))
                continue
            self.asked.append(talk)
            yield cut_prompt(ids, self.room, self.tokenizer)

    def _seed(self, index: int) -> int:
        """Derived from the answer's number, so that its text depends neither on the batch nor on resuming."""
        return self._seed_of(self.asked[index])

    def _seed_of(self, talk: _Talk) -> int:
        return random.Random(f"{self.options.seed} {talk.first + len(talk.results)}").getrandbits(62)


def fill(file: RowsFile, asks: Iterator[Ask], options: Options, processing: Any, bar: tqdm) -> None:
    """Ask until the file is full, and write the answers in the order of the questions."""
    talks: deque[_Talk] = deque()  # those not yet written
    number, tokens, began = file.answers, 0, time.monotonic()

    def next_talk(temperature: float) -> _Talk | None:
        """The next question of this temperature; those of others before it wait in their lanes."""
        nonlocal number
        while len(talks) < ahead and file.has_room(talk.ask for talk in talks):
            if (ask := next(asks, None)) is None:
                break
            talk = _Talk(ask, number)
            talks.append(talk)
            number += ask.num_turns
            if (kept := file.take_kept(talk.first)) is not None:
                talk.results = kept
                continue
            if ask.temperature == temperature:
                return talk
            lanes[ask.temperature].waiting.append(talk)
        return None

    def answered(talk: _Talk) -> None:
        if talk is not talks[0]:
            file.keep(talk.first, talk.results)

    base = load(options)
    lanes = {
        temperature: _Lane(base, processing, options, temperature, lambda t=temperature: next_talk(t), answered)  # type: ignore[misc]
        for temperature in dict.fromkeys(options.temperature)
    }
    ahead = AHEAD * options.batch_size * len(lanes)
    while not file.finished:
        if talks and talks[0].is_answered:
            talk = talks.popleft()
            file.add(talk.ask, talk.results)
            bar.set_postfix_str(f"{tokens / (time.monotonic() - began):.0f} tokens/s", refresh=False)
            bar.update(file.lines - bar.n)
        elif talks:
            tokens += lanes[talks[0].ask.temperature].answer_one()
        elif not any(lane.answer_one() for lane in lanes.values()) and not talks:
            return
