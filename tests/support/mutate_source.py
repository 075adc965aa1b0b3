"""Do the tests notice broken code? Each stated mutation is applied to a copy of the package, and its test must fail.

    python tests/support/mutate_source.py [--only NAME ...] [--jobs 2] [--list]

Prints a table: mutation, test, verdict, seconds. First every test is run on the unmutated copy, where it must pass.
Exit status 1 if a mutation survives or a test fails unmutated.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ != "tests.support.mutate_source":
    sys.path.insert(0, str(ROOT))

from tests.support.source_mutations import MUTATIONS, Mutation  # noqa: E402

COPIED = ("specheads", "tests", "pyproject.toml")  # what a copy has of its own; all else is linked
SECONDS = 180  # after which a test is stopped; a mutation that only hangs is not noticed
PRELOADED = ["torch", "transformers", "transformers.models.llama.modeling_llama", "datasets", "peft", "pytest"]


def find_symbol(root: Path, symbol: str) -> tuple[Path, str, int, int]:
    """The file of a symbol, its text, and where in it the symbol begins and ends. LookupError if it is gone."""
    module, _, name = symbol.partition(":")
    path = root / "specheads" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        raise LookupError(f"there is no module specheads.{module}")
    text = path.read_text("utf8")
    found = symbols(text).get(name)
    if found is None:
        raise LookupError(f"specheads.{module} has no {name}")
    return path, text, *found


def symbols(text: str) -> dict[str, tuple[int, int]]:
    """Where each function and class of a module's text begins and ends, by qualified name; decorators left out."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}

    def visit(nodes: Iterable[ast.AST], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.end_lineno is not None
                found[prefix + node.name] = starts[node.lineno - 1], starts[node.end_lineno]
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(text).body, "")
    return found


def pattern_of(old: str) -> re.Pattern[str]:
    """What finds `old` however its tokens are spaced and broken into lines, and never inside a longer name."""
    tokens = re.findall(r"\w+|[^\w\s]", old)
    body = r"\s*".join(map(re.escape, tokens))
    return re.compile(
        (r"(?<!\w)" if tokens[0][0].isidentifier() else "") + body + (r"(?!\w)" if tokens[-1][-1:].isalnum() else "")
    )


def mutated(mutation: Mutation, root: Path = ROOT) -> tuple[Path, str]:
    """The file that a mutation edits, and its mutated text. LookupError, in one line, where it no longer applies."""
    pattern = pattern_of(mutation.old)
    try:
        path, text, start, stop = find_symbol(root, mutation.symbol)
        found = list(pattern.finditer(text, start, stop))
        if len(found) != 1:
            raise LookupError(f"{mutation.symbol} has {mutation.old!r} {len(found)} times, expected once")
    except LookupError as error:
        where = ", ".join(find_elsewhere(pattern, mutation.symbol, root)) or "nowhere"
        raise LookupError(f"{mutation.name}: {error}; the old text is in {where}") from None
    begin, end = found[0].span()
    return path, text[:begin] + mutation.new + text[end:]


def find_elsewhere(pattern: re.Pattern[str], symbol: str, root: Path) -> list[str]:
    """Up to four symbols of the same name, or else of the same room, in which the old text occurs once."""
    room, name = symbol.split(".")[0], symbol.rpartition(":")[2].rpartition(".")[2]
    held = []
    for path in sorted((root / "specheads" / room).rglob("*.py")):
        text = path.read_text("utf8")
        module = ".".join(path.relative_to(root / "specheads").with_suffix("").parts)
        for inner, (start, stop) in symbols(text).items():
            if len(pattern.findall(text, start, stop)) == 1:
                held.append(f"{module}:{inner}")
    same = [one for one in held if one.rpartition(":")[2].rpartition(".")[2] == name]
    return (same or held)[:4]


def copy_package(target: Path) -> None:
    """A root that tests can run in: code copied, everything else linked."""
    for entry in ROOT.iterdir():
        if entry.name not in COPIED:
            if not entry.name.startswith("."):
                (target / entry.name).symlink_to(entry)
        elif entry.is_dir():
            shutil.copytree(entry, target / entry.name)
        else:
            shutil.copy2(entry, target / entry.name)


def run_test(test: str, k: str, mutation: Mutation | None) -> tuple[int, float, str]:
    """pytest's exit status, seconds, and the end of what it wrote, in a fresh copy and, for that, a fresh process."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        root = Path(folder)
        copy_package(root)
        if mutation is not None:
            path, text = mutated(mutation, root)
            path.write_text(text, "utf8")
        os.chdir(root)
        sys.path[:] = [str(root), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]  # the copy has its own
        os.environ["PYTHONPATH"] = str(root)
        sys.dont_write_bytecode = True
        with open(root / "output.txt", "w+") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            status = run_pytest([f"tests/{test}", "-x", "-q", "-m", "not slow", *(["-k", k] if k else [])])
            sys.stdout.flush()
            text = (root / "output.txt").read_text("utf8", errors="replace")
        os.chdir("/")
    return status, time.perf_counter() - began, text[-3000:]


def run_pytest(arguments: list[str]) -> int:
    import pytest
    import torch

    def stop(*_: object) -> None:
        pytest.exit(f"stopped after {SECONDS} s", returncode=9)

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    torch.set_num_threads(1)
    status = pytest.main([*arguments, "-p", "no:cacheprovider", "--tb=line"])
    signal.alarm(0)
    if (package := sys.modules.get("specheads")) is not None:
        assert Path(str(package.__file__)).is_relative_to(os.getcwd()), f"{package.__file__} was tested, not the copy"
    return int(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutations alone (parts of names will do)")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="list the mutations and run nothing")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.only or any(part in m.name for part in args.only)]
    if args.list:
        for m in chosen:
            print(f"{m.name:40} {m.symbol:60} {m.test}{f' -k {m.k!r}' if m.k else ''}")
        return 0
    for m in chosen:
        mutated(m)  # an entry out of date is an error before anything runs
    controls = {test: {m.k for m in chosen if m.test == test} for test in dict.fromkeys(m.test for m in chosen)}
    work: list[tuple[str, str, Mutation | None]] = [(m.test, m.k, m) for m in chosen]
    for test, ks in controls.items():
        work.append((test, "" if "" in ks else " or ".join(sorted(ks)), None))
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")  # torch and transformers are imported once, and specheads in each process
    context.set_forkserver_preload(PRELOADED)
    bad: list[str] = []
    with ProcessPoolExecutor(args.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        running = {pool.submit(run_test, *one): one for one in work}
        for done in as_completed(running):
            test, k, m = running[done]
            status, seconds, output = done.result()
            verdict = {0: "passed", 1: "FAILED"} if m is None else {0: "SURVIVED", 1: "killed"}
            said = verdict.get(status, f"ERROR {status}")
            name = "(unmutated)" if m is None else m.name
            print(f"{name:40} {said:9} {seconds:6.1f} s  {test}{f' -k {k!r}' if k else ''}", flush=True)
            if said not in ("passed", "killed"):
                bad.append(name)
                if m is None or said != "SURVIVED":
                    print(output, flush=True)
    found = ", ".join(bad) or "-"
    print(f"{len(chosen)} mutations, {len(controls)} test files unmutated; not as they should be: {found}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
