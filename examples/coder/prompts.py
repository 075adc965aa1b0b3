"""Prompts for a small coding model: tasks made from Python source at hand, school mathematics, and everyday questions.

python examples/coder/prompts.py --output prompts.jsonl --math gsm8k_train.jsonl --exclude human_eval.jsonl

Each line is {"messages": [...]}: the user's messages, one or two, for specheads distill to have answered by the
model itself. Functions come from the standard library (PSF licence) and from installed packages whose licence permits
it (PACKAGES). A prompt that shares a run of --ngram words with a row of an --exclude file is left out and counted, so
that nothing here is measured on what was trained on.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specheads.data.corpus import read_text, stdlib_files

PACKAGES = {  # installed beside this toolkit: BSD, MIT, PSF or Apache
    "accelerate", "click", "cycler", "datasets", "dill", "filelock", "fontTools", "fsspec", "httpcore2", "httpx2",
    "huggingface_hub", "idna", "jinja2", "kiwisolver", "markdown_it", "matplotlib", "mpmath", "multiprocess",
    "networkx", "numpy", "openai", "packaging", "pandas", "peft", "pip", "psutil", "pydantic", "pygments",
    "pyparsing", "rich", "setuptools", "sympy", "torch", "tqdm", "transformers", "typer", "xxhash", "yaml",
}  # fmt: skip

CODE_TASKS = {  # task: (weight, wordings); {code} the whole function, {stub} its head and docstring, {what} its purpose
    "complete": (5, ["Complete this function.\n\n```python\n{stub}\n```", "{stub}",
                     "Complete the following Python code:\n{stub}", "Implement this:\n\n```python\n{stub}\n```",
                     "Please finish the function below and return the whole of it.\n```python\n{stub}\n```"]),
    "write": (4, ["Write a Python function that does this: {what}", "{what}\n\nWrite it in Python, as `{name}`.",
                  "I need a Python function `{name}`. {what}", "How would you implement this in Python? {what}"]),
    "explain": (2, ["What does this function do?\n\n```python\n{code}\n```",
                    "Explain this code step by step:\n\n{code}"]),
    "docstring": (1, ["Write a docstring for this function.\n\n```python\n{bare}\n```"]),
    "test": (2, ["Write unit tests for this function.\n\n```python\n{code}\n```",
                 "Write pytest tests, edge cases included:\n{code}"]),
    "fix": (2, ["This function has a bug. Find and fix it.\n\n```python\n{broken}\n```",
                "Why does this not work as its docstring says?\n\n{broken}"]),
    "improve": (1, ["Add type hints and simplify this:\n\n```python\n{bare}\n```",
                    "Review this code and suggest improvements.\n\n```python\n{code}\n```"]),
    "translate": (1, ["Translate this function to JavaScript.\n\n```python\n{code}\n```",
                      "Rewrite in Go:\n\n```python\n{code}\n```", "How would this look in C++?\n\n{code}",
                      "Convert this Python to Rust:\n{code}"]),
}  # fmt: skip
CODE_FOLLOW_UPS = [
    "Now add error handling.", "Can you make it shorter?", "Explain the second half in more detail.",
    "What is its time complexity?", "Show an example of how to call it.", "Write a test for it.",
    "Rewrite it without using any imports.", "Add comments to each line.", "What could go wrong with this?",
]  # fmt: skip
MATH_WORDINGS = [
    "{question}", "{question}", "{question}", "Question: {question}\nLet's think step by step.",
    "{question}\nShow your work.", "Solve this: {question}", "{question} Give the final answer on the last line.",
]  # fmt: skip
MATH_FOLLOW_UPS = ["Check the result in another way.", "What if all the numbers were doubled?",
                   "Write this as an equation.", "Now write a Python program that computes it."]  # fmt: skip
CHAT_WORDINGS = {
    "Explain {} to a ten-year-old.": "idea", "What is {}, and why does it matter?": "idea",
    "Give three arguments for and three against {}.": "claim", "Write a short story about {}.": "thing",
    "Write a poem about {}.": "thing", "Write an email to {}.": "mail", "Summarise what is known about {}.": "idea",
    "What are common mistakes when {}?": "doing", "Give me a step by step plan for {}.": "doing",
    "Make a table that compares {}.": "pair", "What is the difference between {}?": "pair",
    "You are {}. Introduce yourself and answer questions from the audience.": "role",
    "Describe a typical day of {}.": "role", "List ten facts about {}.": "idea",
    "What should I know before {}?": "doing",
    "Write a dialogue between {} and a curious student.": "role", "Write a product description for {}.": "thing",
    "Is it true that {}? Explain.": "claim", "How do I start {}? Answer in five bullet points.": "doing",
    "Which is better and when: {}?": "pair", "Write a JSON object that describes {}.": "thing",
    "Translate into German and French: 'I would like to know more about {}.'": "idea",
}  # fmt: skip
CHAT_FOLLOW_UPS = [
    "Make it shorter.", "Rewrite it in a more formal style.", "Give an example.", "Now say the same as a list.",
    "What is the strongest argument against what you wrote?", "Translate the main point into Spanish.",
    "Explain the last point in more detail.", "Summarise your answer in one sentence.", "Where can I read more?",
]  # fmt: skip
TOPICS = {
    "idea": """photosynthesis; gravity; inflation; supply and demand; a black hole; the water cycle; machine
        learning; recursion; a hash table; public-key encryption; the French Revolution; plate tectonics;
        vaccines; evolution; compound interest; the Doppler effect; quantum entanglement; a database index;
        the greenhouse effect; DNA; opportunity cost; the placebo effect; a binary search tree; the Roman
        Empire; electricity; black-body radiation; object-oriented programming; the immune system; stock
        markets; tides; a compiler; sleep; the Silk Road; entropy; Bayes' theorem; the Pythagorean theorem;
        a neural network; the Renaissance; nuclear fusion; garbage collection; version control; the
        scientific method; cognitive bias; the big bang; antibiotics; game theory; a blockchain; the Cold
        War; prime numbers; ocean currents; natural language processing; an operating system; volcanoes;
        dynamic programming; the nervous system; an eclipse; democracy; carbon dating; a transistor;
        probability; the theory of relativity; the carbon cycle; a web server; the printing press;
        concurrency; a fractal; memory; supply chains; the Internet; rainbows; linear regression; HTTP
        caching; unit testing; a mutex; recursion depth; big-O notation; microservices; regular expressions;
        functional programming; a REST API; Unicode; SQL joins""",
    "claim": """working from home; school uniforms; nuclear power; a four-day week; social media; electric cars;
        remote learning; eating meat; space travel; free public transport; a universal basic income; zoos;
        homework; static typing; code review; open-source software; monolithic repositories; pair
        programming; self-driving cars; learning Latin; paper books; cash payments; standing desks; tourism;
        artificial sweeteners; tests before code""",
    "thing": """a lighthouse in winter; a robot that learns to paint; an old violin; a lost letter; a coffee
        machine; the last library on Earth; a talking cat; a solar lamp; a garden at night; a bicycle made
        of bamboo; a small bakery; a detective who hates mysteries; a message from Mars; a mountain village;
        a clock that runs backwards; rain; a pair of running shoes; a train journey; an astronaut's first
        day home; a forgotten password; a notebook; a dragon afraid of fire; autumn; a chess match; a
        waterproof backpack; a bug that nobody could reproduce; a fox""",
    "mail": """my landlord about a broken heater; a client whose order is late; a professor to ask for an
        extension; a colleague to thank them for their help; a shop to return a jacket; a team about a
        change of plans; a company to apply for an internship; a neighbour about noise; a friend to invite
        them to a birthday party; a manager to ask for feedback; a customer who found a bug; a conference to
        withdraw a talk; my bank about a fee; a hotel to change a booking; parents about a school trip; a
        supplier to ask for a discount; new members of a club""",
    "doing": """learning to cook; moving to another country; starting a vegetable garden; writing a first novel;
        running a marathon; debugging a slow program; preparing for a job interview; adopting a dog;
        learning the guitar; migrating a database; buying a used car; giving a talk; designing a logo;
        saving money; photographing birds; writing unit tests; deploying a web application; planning a
        wedding; learning a language; building a computer; refactoring old code; hiking in winter; brewing
        coffee; meditating; teaching children to swim; writing a paper; naming variables; backing up files;
        organising a small conference; reading scientific articles; baking bread""",
    "pair": """TCP and UDP; a list and a tuple; tea and coffee; Python and Java; cats and dogs; threads and
        processes; a virus and a bacterium; SQL and NoSQL databases; trains and planes; a stack and a queue;
        mitosis and meiosis; a crocodile and an alligator; Git merge and rebase; renting and buying a home;
        depth-first and breadth-first search; a cappuccino and a latte; speed and velocity; JSON and XML;
        weather and climate; an abstract class and an interface; watercolours and oil paint; HTTP and HTTPS;
        running and cycling; mean and median; butter and margarine; shallow and deep copies; a lease and a
        loan; compiled and interpreted languages; stars and planets; UDP and QUIC""",
    "role": """a sea captain; a beekeeper; a medieval baker; a chess grandmaster; a nurse on the night shift; a
        botanist; a software engineer at a small company; a Roman senator; a firefighter; a Mars rover
        operator; a violin maker; a detective; a primary school teacher; a polar explorer; a sports
        reporter; a goalkeeper; a museum guide; a judge; a data scientist; a train driver; a translator; a
        volcano researcher; a carpenter; an orchestra conductor""",
}  # fmt: skip
_SWAPS = [("<", "<="), ("<=", "<"), (">", ">="), ("==", "!="), (" + 1", ""), (" - 1", ""), (" and ", " or "),
          (" not ", " "), ("[0]", "[1]"), ("True", "False"), ("min(", "max("), ("+=", "-="),
          ("return ", "yield ")]  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A documented function: its name, whole source, source up to the docstring, and source without it."""

    name: str
    code: str
    stub: str
    bare: str
    what: str


def functions(text: str) -> Iterator[Function]:
    """Documented functions and methods of 4 to 40 lines in a module's source, dedented."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not 4 <= node.end_lineno - node.lineno <= 40:
            continue
        what = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if not 25 <= len(what) <= 400 or len(node.body) < 2 or node.name.startswith("test") or ">>>" in what:
            continue
        indent = node.col_offset
        own = [line[indent:] for line in lines[node.lineno - 1 : node.end_lineno]]
        if any(line[:indent].strip() for line in lines[node.lineno - 1 : node.end_lineno]):
            continue  # a line that starts left of the function, as inside a string
        docstring = node.body[0]
        first, last = docstring.lineno - node.lineno, docstring.end_lineno - node.lineno + 1
        code = "\n".join(own)
        if len(code) <= 2500:
            yield Function(node.name, code, "\n".join(own[:last]), "\n".join(own[:first] + own[last:]), what)


def sources(folders: Iterable[str] = ()) -> Iterator[Path]:
    """Python files, tests left out: of these folders, or else of the standard library and the PACKAGES installed."""
    for folder in folders:
        yield from (path for path in sorted(Path(folder).rglob("*.py")) if "test" not in path.as_posix())
    if folders:
        return
    yield from (path for name, path in stdlib_files().items() if "test" not in name)
    for name in sorted(PACKAGES):
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from (path for path in sorted(Path(folder).rglob("*.py")) if "test" not in path.as_posix())


def break_it(code: str, stub: str, rng: random.Random) -> str | None:
    """The function with one operator or constant of its body changed, None if it has none of them."""
    head, body = code[: len(stub)], code[len(stub) :]
    swaps = [swap for swap in _SWAPS if swap[0] in body]
    if not swaps:
        return None
    old, new = rng.choice(swaps)
    at = rng.choice([match.start() for match in re.finditer(re.escape(old), body)])
    return head + body[:at] + new + body[at + len(old) :]


def code_prompts(rng: random.Random, count: int, folders: Iterable[str] = ()) -> list[list[str]]:
    seen: dict[str, Function] = {}
    for path in sources(folders):
        for function in functions(read_text(path) or ""):
            seen.setdefault(function.what[:60], function)
    found = rng.sample(sorted(seen.values(), key=lambda function: function.code), min(count, len(seen)))
    names, weights = list(CODE_TASKS), [weight for weight, _ in CODE_TASKS.values()]
    prompts = []
    for function in found:
        task = rng.choices(names, weights)[0]
        broken = break_it(function.code, function.stub, rng) if task == "fix" else ""
        if broken is None:
            continue
        wording = rng.choice(CODE_TASKS[task][1])
        prompts.append([wording.format(**vars(function), broken=broken), *follow_up(rng, CODE_FOLLOW_UPS)])
    return prompts


def math_prompts(rng: random.Random, path: str, count: int) -> list[list[str]]:
    asked = [row.get("question") or row["prompt"] for row in rows(path)]
    return [
        [rng.choice(MATH_WORDINGS).format(question=question), *follow_up(rng, MATH_FOLLOW_UPS)]
        for question in rng.sample(asked, min(count, len(asked)))
    ]


def chat_prompts(rng: random.Random, count: int) -> list[list[str]]:
    pairs = [
        (wording, " ".join(topic.split()))
        for wording, kind in CHAT_WORDINGS.items()
        for topic in TOPICS[kind].split(";")
    ]
    return [
        [wording.format(topic), *follow_up(rng, CHAT_FOLLOW_UPS, share=0.35)]
        for wording, topic in rng.sample(pairs, min(count, len(pairs)))
    ]


def follow_up(rng: random.Random, wordings: list[str], share: float = 0.15) -> list[str]:
    return [rng.choice(wordings)] if rng.random() < share else []


def rows(path: str) -> Iterator[dict[str, str]]:
    with Path(path).open(encoding="utf8") as file:  # not splitlines(), which also splits at U+2028
        yield from map(json.loads, file)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    parts = words(text)
    return {tuple(parts[i : i + size]) for i in range(len(parts) - size + 1)}


def strings(value: object) -> Iterator[str]:
    """All text in a row, whatever its fields are called."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def excluded(paths: Iterable[str], size: int) -> set[tuple[str, ...]]:
    return {gram for path in paths for row in rows(path) for text in strings(row) for gram in ngrams(text, size)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="JSONL file to write")
    parser.add_argument("--math", help="JSONL with `question` or `prompt`: GSM8K's training questions")
    parser.add_argument("--exclude", nargs="*", default=[], help="JSONL files whose text no prompt may share")
    parser.add_argument("--ngram", type=int, default=10, help="words in a row that count as shared (default 10)")
    parser.add_argument(
        "--sources", nargs="*", default=[], help="folders of Python files, instead of what is installed"
    )
    parser.add_argument("--code-rows", type=int, default=8000)
    parser.add_argument("--math-rows", type=int, default=4500)
    parser.add_argument("--chat-rows", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    parts = {
        "code": code_prompts(rng, options.code_rows, options.sources),
        "mathematics": math_prompts(rng, options.math, options.math_rows) if options.math else [],
        "chat": chat_prompts(rng, options.chat_rows),
    }
    forbidden, shared, kept = excluded(options.exclude, options.ngram), Counter[str](), []
    for name, prompts in parts.items():
        for turns in prompts:
            if any(ngrams(text, options.ngram) & forbidden for text in turns):
                shared[name] += 1
            else:
                kept.append((name, turns))
    rng.shuffle(kept)
    with Path(options.output).open("w", encoding="utf8") as file:
        for _, turns in kept:
            messages = [{"role": "user", "content": text} for text in turns]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    counts = Counter(name for name, _ in kept)
    print(f"{options.output}: {len(kept)} prompts, {sum(len(turns) for _, turns in kept)} turns", file=sys.stderr)
    for name in parts:
        print(f"  {name}: {counts[name]}; left out, {options.ngram} words shared: {shared[name]}", file=sys.stderr)


if __name__ == "__main__":
    main()
