"""Tasks: the published prompts, answers parsed from worked text, and a task of shipped data, the same each time."""

import json

import pytest
from transformers import AutoTokenizer

from specheads.bench.compare import signatures
from specheads.bench.compare.tasks import Question, choice_of, complete_function, load_task, number_of, passes
from specheads.data import corpus

ROWS = {
    "mmlu": {"question": "Two plus two?", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "arithmetic"},
    "csqa": {
        "question": "Where do fish live?", "answerKey": "C",
        "choices": {"label": ["A", "B", "C", "D", "E"], "text": ["tree", "sky", "water", "car", "hat"]},
    },
    "gsm8k": {"question": "Tom has 3 apples. He buys 1,200. Now", "answer": "3 + 1200 = <<3+1200=1203>>\n#### 1,203"},
    "humaneval": {
        "task_id": "t/0", "prompt": 'def add(a, b):\n    """Sum."""\n', "entry_point": "add", "canonical_solution": "",
        "test": "def check(f):\n    assert f(1, 2) == 3\n",
    },
}  # fmt: skip


@pytest.fixture
def task(tmp_path, cache_in_tmp):
    def loaded(name, rows=None, **options):
        file = tmp_path / f"{name}.jsonl"
        rows = [ROWS[name]] if rows is None else rows
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf8")
        return load_task(f"{name}:{file}", None, **options)

    return loaded


def test_prompts_are_the_published_ones_and_answers_are_judged_by_the_task(task):
    mmlu, csqa, gsm8k = task("mmlu"), task("csqa"), task("gsm8k")
    asked = mmlu.questions[0]
    assert asked.prompt == "Question: Two plus two?\n(A) 3 (B) 4 (C) 5 (D) 6\n Answer: \n Let's think step by step. "
    assert mmlu.correct("2 + 2 is 4, so the answer is (B).", asked) and not mmlu.correct("(B)? No: (C)", asked)
    asked = csqa.questions[0]
    assert "(C) water (D) car (E) hat" in asked.prompt and csqa.correct("The answer: C", asked)
    assert not csqa.correct("Not (C), and the answer is (E)", asked) and csqa.correct("(C). The answer I gave", asked)
    asked = gsm8k.questions[0]
    assert asked.prompt == (
        "Reason the math question below step by step. Question: Tom has 3 apples. He buys 1,200. Now.\n Answer: "
    )
    assert asked.answer == "1203" and gsm8k.correct("3 + 1,200 = 1,203.00 apples.", asked)
    assert not gsm8k.correct("#### 1202", asked) and not gsm8k.correct("many", asked)


LETTERS = {
    "The answer is (C).": "C", "The ANSWER IS B": "B", "Answer: D": "D", "B": "B", " A. Because": "A",
    "(A) is wrong, (D) is right": "D", "The answer is (A). No, the answer is (B).": "B", "": None,
    "Apples grow": None, "I think so": None, "the answer is a number": None,
    "The answer is Basel": None, "So it is (B). Answer is (A)": "A",
    "The correct answer is **B) populated areas**.": "B", "**Answer:** B": "B", "**Answer**: (C)": "C",
    r"the answer is \boxed{B}": "B", r"The answer is $\boxed{\text{D}}$.": "D", "The answer is option B": "B",
    "Answer: the choice (A)": "A", "In my answer I chose (B).": "B", "The answer is (H)": None,
}  # fmt: skip
NUMBERS = {
    "#### 42": "42", "1 + 1 = 2\n#### -3\n": "-3", "The answer is $1,234.50.": "1234.5", "so 7 and 8": "8",
    "the answer is 5, not 6": "5", "#### 12.0": "12", "100": "100", "none": None, "It costs $18.": "18",
    "3.10 dollars": "3.1", "#### 5 or 6": "5",
}  # fmt: skip


def test_the_letter_and_the_number_of_a_worked_answer_are_found():
    assert {text: choice_of(text, "ABCD") for text in LETTERS} == LETTERS
    assert {text: number_of(text) for text in NUMBERS} == NUMBERS


def test_a_completion_passes_if_its_program_does_and_code_runs_only_where_it_may(task):
    with pytest.raises(ValueError, match="run_code=True"):
        task("humaneval")
    humaneval = task("humaneval", run_code=True)
    asked = humaneval.questions[0]
    assert humaneval.correct("    return a + b\n\ndef other():\n    fail(\n", asked)
    assert not humaneval.correct("    return a - b\n", asked) and not humaneval.correct("    return (", asked)
    assert complete_function("def f():\n", "    return 1\nprint(f())") == "def f():\n    return 1\n"
    asked = Question("def f():\n", "f", {"test": "def check(f): f()"})
    assert not passes("    while True: pass\n", asked, seconds=0.3)
    assert not passes("    raise SystemExit(1)\n", asked)


def test_rows_that_are_not_the_task_s_are_refused_with_their_number(task):
    with pytest.raises(ValueError, match="gsm8k, row 2: the answer 'none' holds no number"):
        task("gsm8k", [ROWS["gsm8k"], {"question": "?", "answer": "none"}])
    with pytest.raises(ValueError, match="mmlu, row 1: no column 'question'"):
        task("mmlu", [{"choices": ["a"], "answer": 0}])
    with pytest.raises(ValueError, match="did you mean 'gsm8k'"):
        load_task("gsm8", None)
    assert len(task("gsm8k", [ROWS["gsm8k"]] * 5, count=3).questions) == 3


def test_fewer_questions_are_spaced_over_the_rows_which_may_be_grouped_but_for_csqa_s_first(task):
    rows = [{**ROWS["gsm8k"], "question": str(i)} for i in range(10)]
    asked = [str(question.prompt) for question in task("gsm8k", rows, count=3).questions]
    assert [text.partition("Question: ")[2][0] for text in asked] == ["0", "3", "6"]
    assert len(task("gsm8k", rows, count=99).questions) == len(task("gsm8k", rows).questions) == 10
    rows = [{**ROWS["csqa"], "question": str(i)} for i in range(10)]
    assert [q.prompt[10] for q in task("csqa", rows, count=3).questions] == ["0", "1", "2"]
    with pytest.raises(ValueError, match="gsm8k, row 6: "):
        task("gsm8k", [ROWS["gsm8k"]] * 5 + [{"question": "?", "answer": "none"}] * 5, count=2)


def test_a_signature_ends_at_the_colon_outside_brackets():
    assert signatures.signature_written("self, a: int = 3) -> dict[str, int]:\n  x") == "self,a:int=3)->dict[str,int]:"
    assert signatures.signature_written("f=lambda: 0, *, b={1: 2}):\n") == "f=lambda:0,*,b={1:2}):"
    assert signatures.signature_written("self, a") is None
    text = "class A:\n    def f(self, a,\n          b=2):\n        return 1\n\ndef g(x): return x\n"
    assert list(signatures.functions(text)) == [
        ("def g(", "x):", "def g(x): return x"),
        ("    def f(", "self, a,\n          b=2):", "    def f(self, a,\n          b=2):\n        return 1"),
    ]
    assert list(signatures.functions("def f(:")) == []


def test_signature_questions_are_the_same_each_time_and_only_of_held_out_files():
    tokenizer = AutoTokenizer.from_pretrained(corpus.checkpoints_dir() / "base")
    questions = signatures.signature_questions(tokenizer, 24)
    assert questions == signatures.signature_questions(tokenizer, 24) and len({str(ids) for ids, _ in questions}) == 24
    held_out = "".join(signatures.plain(text) for _, text in corpus.texts("held_out"))
    for ids, answer in questions:
        shown = tokenizer.decode(ids)
        assert len(ids) <= signatures.SHOWN + 24
        head = shown.rpartition("\n")[2]
        assert head.strip().startswith("def ") and head.endswith("(")
        assert signatures.plain(head) + answer in held_out
    with pytest.raises(ValueError, match="signatures asked for"):
        signatures.signature_questions(tokenizer, 10**6)
