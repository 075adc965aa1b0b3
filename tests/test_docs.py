"""The site of docs/: its pages are in its navigation, what they show runs, and their figures and messages are real.

`make docs` builds it and checks links; the generator is no dependency of the tests.
"""

import ast
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

import specheads
from tests.support.command_line import run
from tests.support.markdown import blocks
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = ("choose", "concepts", "troubleshooting")
MADE = ("index.md", "tour.md", "api.md")  # of other files, by docs/site/hooks.py


def page(name):
    return (DOCS / f"{name}.md").read_text("utf8")


@pytest.fixture
def hooks(monkeypatch):
    """docs/site/hooks.py, with a stand-in for the generator."""
    files = ModuleType("mkdocs.structure.files")
    files.File = SimpleNamespace(generated=lambda config, name, content: (name, content))
    for name in ("mkdocs", "mkdocs.structure"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", files)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = ModuleType("hooks")
    made.__file__ = str(DOCS / "site" / "hooks.py")
    exec(compile((DOCS / "site" / "hooks.py").read_text("utf8"), made.__file__, "exec"), vars(made))
    return made


def test_each_page_is_in_the_navigation_once():
    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for part in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(part)]

    named = leaves(yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text("utf8"))["nav"])
    assert sorted(named) == sorted([*MADE, *(path.name for path in DOCS.glob("*.md"))])


def test_what_the_pages_show_runs(shipped, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").symlink_to(shipped)
    monkeypatch.chdir(tmp_path)
    for name in PAGES:
        scope = {}
        for block in blocks(page(name), "python"):
            exec(block, scope)
        for block in blocks(page(name), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line)
                code, out, err = run(capsys, *arguments)
                assert program == "specheads" and code == 0, out + err
    assert blocks(page("concepts"), "python") and (tmp_path / "runs" / "choose" / "bench.md").is_file()


def test_the_figures_of_heads_are_those_that_were_measured():
    """Every row of the table of heads is in the file that benchmarks/heads.py wrote, and so is the order."""
    measured = {}
    for line in (DOCS / "benchmarks" / "seven_heads" / "heads.md").read_text("utf8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and "(" in cells[3]:
            measured[cells[0]] = [cells[i].split(" ")[0] for i in (3, 4, 6, 7)]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|", page("choose"), re.MULTILINE)
    assert len(rows) == 6
    for name, *figures in rows:
        assert figures == measured[name], name
    assert [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True)
    for figure in re.findall(r"\| ([\d.]+×) \|", page("choose")):
        assert figure in page("measured"), figure


def test_the_messages_of_troubleshooting_are_ones_that_the_source_writes():
    written = []
    for path in (ROOT / "specheads").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                written.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                written.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
    messages = re.findall(r"^\| `([^`]+)`", page("troubleshooting"), re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        for part in filter(None, (part.strip(" []?;:,") for part in message.split("…"))):
            assert any(part in text for text in written), f"{part!r} of {message!r}"


def test_pages_that_are_made_hold_their_sources(hooks):
    made = dict(hooks.on_files([], None))
    assert tuple(made) == MADE
    for target in re.findall(r"\]\(([\w./-]+\.md)", made["index.md"] + made["tour.md"]):
        assert (DOCS / target).resolve().exists() or target in MADE, target
    assert "tokens a step" in made["tour.md"] and "```text\n" in made["tour.md"]
    listed = re.findall(r"^::: [\w.]+\.(\w+)$", made["api.md"], re.MULTILINE)
    assert sorted(listed) == sorted(specheads.__all__)


def test_links_out_of_the_docs_lead_to_the_repository_or_are_plain(hooks):
    text = "[a](../setup.py#x) [b](speed.md#c) [c](https://d.e/f) [g](../nothing) ![h](pictures/lossy.svg)"
    address = "https://host/owner/name"
    inside = "[b](speed.md#c) [c](https://d.e/f) [g](../nothing) ![h](pictures/lossy.svg)"
    assert hooks.outward(text, Path(), address) == f"[a]({address}/blob/main/setup.py#x) {inside}"
    assert hooks.outward(text, Path(), None) == f"a {inside}"


def test_the_pictures_are_shown_and_there():
    shown = re.findall(r"!\[[^\]]+\]\(pictures/(\w+)\.svg\)", page("concepts"))
    drawn = re.findall(r"^def (\w+)\(look\):", (DOCS / "site" / "pictures.py").read_text("utf8"), re.MULTILINE)
    assert sorted(shown) == sorted(drawn) == sorted(path.stem for path in (DOCS / "pictures").glob("*.svg"))
