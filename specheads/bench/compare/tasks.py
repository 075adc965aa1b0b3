"""Prompts with right answers: MMLU, GSM8K, CSQA, HumanEval, and signatures from shipped data.

Prompts of MMLU and GSM8K are those of Cascade Speculative Drafting, arXiv:2312.11462. CSQA is asked like MMLU, and
HumanEval with its own prompts. Rows come from the hub or from local files with the hub's columns; MMLU also accepts the
columns of CS Drafting's files.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.bench.compare.signatures import signature_questions, signature_written
from specheads.bench.prompts import spaced_indices
from specheads.options import OptionError, Suggestion, refuse_unknown

LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Question:
    """prompt: text or token ids. answer: the right one."""

    prompt: str | list[int]
    answer: str
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskSource:
    """Where rows are on the hub, and how a row becomes a question. columns: each row of the task has one of them.
    correct: is the text written for a question right?"""

    hub: str
    subset: str | None
    split: str
    columns: tuple[str, ...]
    question: Callable[[Mapping[str, Any]], Question]
    correct: Callable[[str, Question], bool]


@dataclass(frozen=True)
class Task:
    """Questions, and how their answers are judged."""

    name: str
    questions: list[Question]
    correct: Callable[[str, Question], bool]


def choice_of(text: str, letters: str) -> str | None:
    """The one of `letters` that a worked answer chooses: after the last "answer is", "answer is option" or "answer:",
    else the last one in brackets, else at the start of the text. Markdown asterisks and LaTeX boxes around it are
    ignored."""
    text = text.replace("*", "")
    while (unboxed := re.sub(r"\$?\\(?:boxed|text\w*)\s*\{([^{}]*)\}\$?", r"\1", text)) != text:
        text = unboxed
    letter = f"([{letters}])"
    choices = re.findall(
        rf"(?i:answer\s*(?:is|:)?\s*:?\s*(?:(?:the\s+)?(?:option|choice)\s*:?\s*)?)\(?{letter}\b", text
    )
    choices = choices or re.findall(rf"\({letter}\)", text) or re.findall(rf"^\s*{letter}(?=[.):,]|\s*$)", text)
    return choices[-1] if choices else None


def number_of(text: str) -> str | None:
    """The number that a worked answer ends with: after "####", else after the last "answer is", else the last number.

    Without thousands separators, and without the fraction if it is zero.
    """
    number = r"\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)"
    numbers = re.findall("####" + number, text) or re.findall(r"answer\s*(?:is|:)\s*:?" + number, text, re.IGNORECASE)
    numbers = numbers or re.findall(r"(?<![\d.])(-?\d[\d,]*(?:\.\d+)?)", text)
    if not numbers:
        return None
    plain = numbers[-1].replace(",", "")
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


# The start of code or text after the requested function.
_ENDS = re.compile(r"\n(?=(?:class|def|if|print|#|@|import|from)\b|#|@|```)")


def complete_function(prompt: str, completion: str) -> str:
    """The prompt and the completion, cut at the end of the function."""
    return prompt + _ENDS.split(completion, maxsplit=1)[0] + "\n"


def passes(completion: str, asked: Question, *, seconds: float = 10.0) -> bool:
    """Does the completed function pass its tests in time? Runs code that a model wrote: without environment, input or
    output, in a temporary folder, but with all permissions of this process."""
    assert isinstance(asked.prompt, str)
    program = f"{complete_function(asked.prompt, completion)}\n{asked.extra['test']}\ncheck({asked.answer})\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program], cwd=folder, env={}, timeout=seconds, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _right_choice(text: str, asked: Question) -> bool:
    return choice_of(text, asked.extra["letters"]) == asked.answer


def _right_number(text: str, asked: Question) -> bool:
    return number_of(text) == asked.answer


SOURCES = {
    "mmlu": TaskSource("cais/mmlu", "all", "test", ("choices", "target"), mmlu, _right_choice),
    "gsm8k": TaskSource("openai/gsm8k", "main", "test", ("question",), gsm8k, _right_number),
    "csqa": TaskSource("tau/commonsense_qa", None, "validation", ("answerKey",), csqa, _right_choice),
    "humaneval": TaskSource("openai/openai_humaneval", None, "test", ("entry_point",), humaneval, passes),
}
SHIPPED_QUESTIONS = 64


def rows_of(name: str, files: Sequence[str] = ()) -> Sequence[Mapping[str, Any]]:
    """The rows of a task: from local files, else from the hub. From JSON with named splits, the test split."""
    from specheads.data.sources import load_dataset_rows

    source = SOURCES[name]
    if not files:
        return load_dataset_rows(source.hub, source.split, subset=source.subset, prompt_column=source.columns[0])
    splits = [rows for file in files if (rows := _test_split(Path(file)))]
    data: Any = list(itertools.chain(*splits)) if len(splits) == len(files) else list(files)
    return load_dataset_rows(data, prompt_column=source.columns[0], text_column=source.columns[-1])


def _test_split(file: Path) -> list[Any] | None:
    """The rows of a .json file of the form {"test": [row …]}, as CS Drafting's gsm8k file; None for other files."""
    if file.suffix != ".json" or not file.is_file():
        return None
    try:
        content = json.loads(file.read_text("utf8"))
    except ValueError:  # JSON lines
        return None
    rows = content.get("test") if isinstance(content, dict) else None
    return rows if isinstance(rows, list) else None


def load_task(text: str, tokenizer: Any, count: int | None = None, *, run_code: bool = False) -> Task:
    """NAME or NAME:FILE,… → `count` questions of a task, evenly spaced, since rows may be grouped, as MMLU's are by
    subject; for `csqa` the first, as in fuzzy speculative decoding's own script.

    ValueError or OSError, with the reason, for rows that are not the task's. ValueError for HumanEval unless run_code
    permits running code that the model wrote."""
    name, _, rest = text.partition(":")
    files = [file for file in rest.split(",") if file]
    refuse_unknown([name], ("signatures", *SOURCES), "task")
    if name == "signatures":
        if files:
            raise ValueError("the task signatures is made of shipped data and takes no files")
        asked = signature_questions(tokenizer, count or SHIPPED_QUESTIONS)
        return Task(
            text, [Question(ids, answer) for ids, answer in asked],
            lambda written, question: signature_written(written) == question.answer,
        )  # fmt: skip
    if name == "humaneval" and not run_code:
        raise OptionError(
            "humaneval runs the programs that the model writes; allow it with {run_code}, best in a sandbox",
            run_code=Suggestion(True),
        )
    source, rows = SOURCES[name], rows_of(name, files)
    questions = []
    for index in range(len(rows))[:count] if name == "csqa" else spaced_indices(len(rows), count):
        try:
            questions.append(source.question(rows[index]))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            reason = f"no column {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{name}, row {index + 1}: {reason}; expected the columns of {source.hub}") from error
    return Task(text, questions, source.correct)
