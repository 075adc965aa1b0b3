"""Tasks whose answers are checked exactly: MMLU, GSM8K, CSQA, HumanEval, and those made from shipped data.

Prompts of MMLU and GSM8K are those of Cascade Speculative Drafting, arXiv:2312.11462. CSQA is asked like MMLU, and
HumanEval with its own prompts. Rows come from the hub or from local files with the hub's columns; MMLU also accepts the
columns of CS Drafting's files.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.bench.prompts import evenly_spaced, held_out_prompts, prompts_from, spaced_indices
from specheads.bench.sweep.grid import TASKS
from specheads.bench.sweep.programs import passes
from specheads.bench.sweep.signatures import signature_questions, signature_written
from specheads.bench.sweep.syntax import parses, syntax_questions
from specheads.options import OptionError, Suggestion, refuse_unknown

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Question:
    """prompt: text or token ids. answer: the right one, in the form that the task's `parse` returns."""

    prompt: str | list[int]
    answer: str
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskSource:
    """Where rows are on the hub, and how a row becomes a question. columns: each row of the task has one of them.
    parse: text written for a question → the answer it gives. max_new_tokens: for an answer."""

    hub: str
    subset: str | None
    split: str
    columns: tuple[str, ...]
    question: Callable[[Mapping[str, Any]], Question]
    parse: Callable[[str, Question], str | None]
    max_new_tokens: int


@dataclass(frozen=True)
class Task:
    """Questions, and how their answers are judged. correct: None if they have no answers."""

    name: str
    questions: list[Question]
    max_new_tokens: int
    correct: Callable[[str, Question], bool] | None


def choice_of(text: str, letters: str) -> str | None:
    """The one of `letters` that a worked answer chooses: after the last "answer is", "answer is option" or "answer:",
    else the last one in brackets, else at the start of the text. Markdown asterisks and LaTeX boxes around it are
    ignored."""
    text = text.replace("*", "")
    while (unboxed := re.sub(r"\$?\\(?:boxed|text\w*)\s*\{([^{}]*)\}\$?", r"\1", text)) != text:
        text = unboxed
    one = f"([{letters}])"
    said = re.findall(rf"(?i:answer\s*(?:is|:)?\s*:?\s*(?:(?:the\s+)?(?:option|choice)\s*:?\s*)?)\(?{one}\b", text)
    said = said or re.findall(rf"\({one}\)", text) or re.findall(rf"^\s*{one}(?=[.):,]|\s*$)", text)
    return said[-1] if said else None


def choice_for(text: str, asked: Question) -> str | None:
    return choice_of(text, asked.extra["letters"])


def number_of(text: str) -> str | None:
    """The number that a worked answer ends with: after "####", else after the last "answer is", else the last number.

    Without thousands separators, and without the fraction if it is zero.
    """
    number = r"\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)"
    found = re.findall("####" + number, text) or re.findall(r"answer\s*(?:is|:)\s*:?" + number, text, re.IGNORECASE)
    found = found or re.findall(r"(?<![\d.])(-?\d[\d,]*(?:\.\d+)?)", text)
    if not found:
        return None
    plain = found[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def mmlu(row: Mapping[str, Any]) -> Question:
    """A row of MMLU as a question. Columns: question, choices, answer (a letter or its index), as on the hub; or CS
    Drafting's input, A, B, C, D, target."""
    columns, choices = mmlu_columns(row), _mmlu_choices(row)
    if columns["target"] not in choices:
        raise ValueError(f"the answer {columns['target']!r} is none of its choices {', '.join(choices)}")
    return Question(mmlu_prompt(row), columns["target"], {"letters": "".join(choices)})


def mmlu_prompt(row: Mapping[str, Any]) -> str:
    """The prompt for a row with either set of columns; the answer may be missing."""
    question = row["input"] if row.get("input") is not None else row["question"]
    choices = _mmlu_choices(row)
    return f"Question: {question}\n{_lettered([*choices], [*choices.values()])}\n Answer: \n Let's think step by step. "


def mmlu_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of MMLU converted to CS Drafting's columns, whichever columns it has."""
    if row.get("input") is not None:
        return {name: row[name] for name in ("input", *"ABCD", "target")}
    answer = row["answer"]
    target = answer if isinstance(answer, str) else LETTERS[answer]
    return {"input": row["question"], **_mmlu_choices(row), "target": target}


def _mmlu_choices(row: Mapping[str, Any]) -> dict[str, Any]:
    """Letter → text of the choice."""
    if row.get("input") is not None:
        return {letter: row[letter] for letter in "ABCD" if row[letter] is not None}
    return dict(zip(LETTERS, row["choices"], strict=False))


def csqa(row: Mapping[str, Any]) -> Question:
    options = _lettered(row["choices"]["label"], row["choices"]["text"])
    prompt = f"Question: {row['question']}\n{options}\n Answer: \n Let's think step by step. "
    return Question(prompt, row["answerKey"], {"letters": "".join(row["choices"]["label"])})


def gsm8k(row: Mapping[str, Any]) -> Question:
    answer = number_of(row["answer"])
    if answer is None:
        raise ValueError(f"the answer {row['answer']!r:.80} holds no number")
    return Question(gsm8k_prompt(row["question"]), answer)


def gsm8k_prompt(question: str) -> str:
    return f"Reason the math question below step by step. Question: {question}.\n Answer: "


def humaneval(row: Mapping[str, Any]) -> Question:
    return Question(row["prompt"], row["entry_point"], {"test": row["test"]})


def _lettered(letters: Sequence[str], options: Sequence[str]) -> str:
    return " ".join(f"({letter}) {option}" for letter, option in zip(letters, options, strict=False))


SOURCES = {
    "mmlu": TaskSource("cais/mmlu", "all", "test", ("choices", "target"), mmlu, choice_for, 256),
    "gsm8k": TaskSource("openai/gsm8k", "main", "test", ("question",), gsm8k, lambda text, asked: number_of(text), 256),
    "csqa": TaskSource("tau/commonsense_qa", None, "validation", ("answerKey",), csqa, choice_for, 256),
    "humaneval": TaskSource(
        "openai/openai_humaneval", None, "test", ("entry_point",), humaneval, lambda text, asked: text, 384
    ),
}
SOURCES["sampled_mmlu"] = SOURCES["mmlu"]  # a sample of MMLU in a local file
# Default max_new_tokens of an answer.
LENGTHS = {
    "signatures": 24, "syntax": 96, "prompts": 128, **{name: source.max_new_tokens for name, source in SOURCES.items()},
}  # fmt: skip
SHIPPED_QUESTIONS = 64


def source_of(name: str, data: Sequence[str]) -> TaskSource:
    """The source of a task's rows. ValueError for a task without rows, or one that is not on the hub without `data`."""
    refuse_unknown([name], SOURCES, "task with rows")
    if name == "sampled_mmlu" and not data:
        raise OptionError("sampled_mmlu is a file of MMLU's rows that was drawn once: name it by {data}", data=...)
    return SOURCES[name]


def rows_of(source: TaskSource, data: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    """The rows of a task: from local files, else from the hub. From JSON with named splits, the test split."""
    from specheads.data.sources import load_dataset_rows

    if not data:
        return load_dataset_rows(
            source.hub, source.split, subset=source.subset, prompt_column=source.columns[0]
        )  # fmt: skip
    splits = [rows for file in data if (rows := _test_split(Path(file)))]
    given: Any = list(itertools.chain(*splits)) if len(splits) == len(data) else list(data)
    return load_dataset_rows(given, prompt_column=source.columns[0], text_column=source.columns[-1])


def _test_split(file: Path) -> list[Any] | None:
    """The rows of a .json file of the form {"test": [row …]}, as CS Drafting's gsm8k file; None for other files."""
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        held = json.loads(file.read_text("utf8"))
    except ValueError:  # JSON lines
        return None
    rows = held.get("test") if isinstance(held, dict) else None
    return rows if isinstance(rows, list) else None


def load_task(
    name: str, tokenizer: Any, *, data: Sequence[str] = (), count: int | None = None, run_code: bool = False
) -> Task:
    """`count` questions of a task, evenly spaced; for `csqa` the first, as in fuzzy speculative decoding's own script.

    ValueError or OSError, with the reason, for rows that are not the task's. ValueError for HumanEval unless run_code
    permits running code that the model wrote."""
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
            texts = evenly_spaced([text for file in data for text in prompts_from(Path(file))], count)
            asked = [t if isinstance(t, str) else t.prompt((), tokenizer) for t in texts]
        else:
            asked = [*held_out_prompts(tokenizer, count or 8)]
        return Task(name, [Question(prompt, "") for prompt in asked], LENGTHS[name], None)
    source = source_of(name, data)
    if name == "humaneval" and not run_code:
        raise OptionError(
            "humaneval runs the programs that the model writes; allow it with {run_code}, best in a sandbox",
            run_code=Suggestion(True),
        )
    questions = []
    rows = rows_of(source, data)
    # Evenly spaced, since rows may be grouped, as MMLU's are by subject.
    for index in range(len(rows))[:count] if name == "csqa" else spaced_indices(len(rows), count):
        try:
            questions.append(source.question(rows[index]))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            reason = f"no column {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{name}, row {index + 1}: {reason}; expected the columns of {source.hub}") from error

    def correct(text: str, asked: Question) -> bool:
        if name == "humaneval":
            assert isinstance(asked.prompt, str)
            return passes(asked.prompt, text, asked.extra["test"], asked.answer)
        return source.parse(text, asked) == asked.answer

    return Task(name, questions, source.max_new_tokens, correct)
