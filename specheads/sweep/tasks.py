"""Questions with answers that are checked exactly: MMLU, GSM8K, CSQA and HumanEval, or one made of shipped data.

Prompts of MMLU and GSM8K are those of Cascade Speculative Drafting, arXiv:2312.11462; CSQA is asked as MMLU is, and
HumanEval by its own prompts. Rows come from the hub or from local files with the hub's columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specheads.bench.prompts import held_out_prompts
from specheads.options import refuse_unknown
from specheads.sweep.grid import TASKS
from specheads.sweep.programs import passes
from specheads.sweep.signatures import signature_questions, signature_written
from specheads.sweep.syntax import parses, syntax_questions

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Question:
    """prompt: text or token ids. answer: as the task's `parse` gives it."""

    prompt: str | list[int]
    answer: str
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where rows are on the hub, and how one becomes a question. max_new_tokens: what an answer takes."""

    hub: str
    subset: str | None
    split: str
    column: str
    question: Callable[[Mapping[str, Any]], Question]
    parse: Callable[[str], str | None]
    max_new_tokens: int


@dataclass(frozen=True)
class Task:
    """Questions and how their answers are judged; parse None: there is nothing to judge."""

    name: str
    questions: list[Question]
    max_new_tokens: int
    correct: Callable[[str, Question], bool] | None


def choice_of(text: str) -> str | None:
    """The letter a worked answer settles on: behind the last "answer is", else the last in brackets, else the one that
    the text opens with."""
    said = re.findall(r"(?i:answer\s*(?:is|:)?\s*:?\s*)\(?([A-J])\b", text) or re.findall(r"\(([A-J])\)", text)
    said = said or re.findall(r"^\s*([A-J])(?=[.):,]|\s*$)", text)
    return said[-1] if said else None


def number_of(text: str) -> str | None:
    """The number a worked answer ends in: behind "####", else behind the last "answer is", else the last there is.

    Without thousands separators, and without a fraction where that is zero.
    """
    number = r"\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)"
    found = re.findall("####" + number, text) or re.findall(r"answer\s*(?:is|:)\s*:?" + number, text, re.IGNORECASE)
    found = found or re.findall(r"(?<![\d.])(-?\d[\d,]*(?:\.\d+)?)", text)
    if not found:
        return None
    plain = found[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def mmlu(row: Mapping[str, Any]) -> Question:
    options = _lettered(LETTERS, row["choices"])
    answer = row["answer"]
    prompt = f"Question: {row['question']}\n{options}\n Answer: \n Let's think step by step. "
    return Question(prompt, answer if isinstance(answer, str) else LETTERS[answer])


def csqa(row: Mapping[str, Any]) -> Question:
    options = _lettered(row["choices"]["label"], row["choices"]["text"])
    prompt = f"Question: {row['question']}\n{options}\n Answer: \n Let's think step by step. "
    return Question(prompt, row["answerKey"])


def gsm8k(row: Mapping[str, Any]) -> Question:
    answer = number_of(row["answer"])
    if answer is None:
        raise ValueError(f"the answer {row['answer']!r:.80} holds no number")
    return Question(f"Reason the math question below step by step. Question: {row['question']}.\n Answer: ", answer)


def humaneval(row: Mapping[str, Any]) -> Question:
    return Question(row["prompt"], row["entry_point"], {"test": row["test"]})


def _lettered(letters: Sequence[str], options: Sequence[str]) -> str:
    return " ".join(f"({letter}) {option}" for letter, option in zip(letters, options, strict=False))


SOURCES = {
    "mmlu": Source("cais/mmlu", "all", "test", "choices", mmlu, choice_of, 256),
    "gsm8k": Source("openai/gsm8k", "main", "test", "question", gsm8k, number_of, 256),
    "csqa": Source("tau/commonsense_qa", None, "validation", "answerKey", csqa, choice_of, 256),
    "humaneval": Source("openai/openai_humaneval", None, "test", "entry_point", humaneval, lambda text: text, 384),
}
# What an answer takes where the sweep does not say.
LENGTHS = {
    "signatures": 24, "syntax": 96, "prompts": 128, **{name: source.max_new_tokens for name, source in SOURCES.items()},
}  # fmt: skip
SHIPPED_QUESTIONS = 64


def load_task(
    name: str, tokenizer: Any, *, data: Sequence[str] = (), count: int | None = None, run_code: bool = False
) -> Task:
    """The first `count` questions of a task, or evenly spaced ones of `signatures` and `syntax`. ValueError or OSError,
    with the reason, for rows that are not the task's; ValueError for HumanEval unless run_code allows to run what is
    written."""
    refuse_unknown([name], TASKS, "task")
    if name in ("signatures", "syntax") and data:
        raise ValueError(f"the task {name} is made of shipped data and takes no data")
    if name == "syntax":
        begun = syntax_questions(tokenizer, count or SHIPPED_QUESTIONS)
        return Task(
            name, [Question(shown, around) for shown, around in begun], LENGTHS[name],
            lambda text, asked: isinstance(asked.prompt, str) and parses(asked.prompt, text, asked.answer),
        )  # fmt: skip
    if name == "signatures":
        made = signature_questions(tokenizer, count or SHIPPED_QUESTIONS)
        questions = [Question(ids, answer) for ids, answer in made]
        return Task(name, questions, LENGTHS[name], lambda text, asked: signature_written(text) == asked.answer)
    if name == "prompts":
        if data:
            from pathlib import Path

            from specheads.bench.prompts import prompts_from

            texts = [text for file in data for text in prompts_from(Path(file))][:count]
            asked = [t if isinstance(t, str) else t.prompt((), tokenizer) for t in texts]
        else:
            asked = [*held_out_prompts(tokenizer, count or 8)]
        return Task(name, [Question(prompt, "") for prompt in asked], LENGTHS[name], None)
    source = SOURCES[name]
    if name == "humaneval" and not run_code:
        raise ValueError(
            "humaneval runs the programs that the model writes; allow it with --run-code, best in a sandbox"
        )
    from specheads.data import load_dataset_rows

    rows = load_dataset_rows(
        list(data) or source.hub, "train" if data else source.split, subset=None if data else source.subset,
        prompt_column=source.column,
    )  # fmt: skip
    questions = []
    for number, row in enumerate(rows.select(range(min(count or len(rows), len(rows)))), start=1):
        try:
            questions.append(source.question(row))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            reason = f"no column {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{name}, row {number}: {reason}; expected the columns of {source.hub}") from error

    def correct(text: str, asked: Question) -> bool:
        if name == "humaneval":
            assert isinstance(asked.prompt, str)
            return passes(asked.prompt, text, asked.extra["test"], asked.answer)
        return source.parse(text) == asked.answer

    return Task(name, questions, source.max_new_tokens, correct)
