"""What a person looks for in a repository: its workflow, promises, citation and image name things that exist."""

import ast
import re
import subprocess

import pytest
import yaml

from specheads.version import __version__
from tests.support.paths import ROOT

GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text("utf8")


@pytest.fixture(scope="module")
def metadata():
    """The functions of setup.py, which is not run."""
    body = [node for node in ast.parse((ROOT / "setup.py").read_text("utf8")).body if not isinstance(node, ast.Expr)]
    scope = {"__file__": str(ROOT / "setup.py")}
    exec(compile(ast.Module(body, type_ignores=[]), "setup.py", "exec"), scope)
    return scope


def test_the_workflow_runs_what_the_makefile_has():
    jobs = yaml.safe_load((GITHUB / "workflows" / "checks.yml").read_text("utf8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {command.removeprefix("make ") for command in commands if command.startswith("make ")}
    assert targets == {"test", "lint", "docs"}
    assert all(re.search(rf"^{target}: \$\(STAMP\)$", MAKEFILE, re.MULTILINE) for target in targets)


def test_make_prints_its_targets():
    said = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert all(f"make {target}" in said for target in phony if target not in ("help", "install")), said


def test_the_tests_that_the_promises_name_exist():
    text = (GITHUB / "SECURITY.md").read_text("utf8")
    files, functions = re.findall(r"`(tests/[\w/.]+)`", text), re.findall(r"`(test_\w+)`", text)
    assert len(files) > 3 and all((ROOT / name).exists() for name in files), files
    written = "".join(path.read_text("utf8") for path in (ROOT / "tests" / "models").glob("*.py"))
    assert len(functions) > 5 and all(f"def {name}(" in written for name in functions), functions


def test_forms_are_forms():
    forms = [yaml.safe_load(path.read_text("utf8")) for path in (GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")]
    assert len(forms) == 3 and all(form["name"] and form["description"] and form["body"] for form in forms)
    for form in forms:
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(set(ids)) == len(ids) > 0


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf8"))
    assert citation["version"] == __version__ and citation["cff-version"] == "1.2.0" and citation["authors"]


def test_the_image_copies_what_is_there_and_installs_what_the_makefile_does():
    text = (ROOT / ".ci" / "Dockerfile").read_text("utf8")
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert "setup.py" in copied and all((ROOT / name).exists() for name in copied), copied
    torch = set(re.findall(r"torch==([\d.]+)", MAKEFILE + text))
    assert len(torch) == 1 and "-r requirements.txt" in text


def test_links_work_where_pypi_shows_the_readme(metadata):
    address = "https://host/owner/name"
    shown = metadata["description"](address)
    targets = re.findall(r"\]\(([^)\s]+)\)", shown)
    assert targets and all("://" in target or target.startswith("#") for target in targets)
    for target in targets:
        if target.startswith(address):
            path = re.sub(f"^{address}/(blob|raw)/main/", "", target)  # raw: a picture
            assert (ROOT / path.partition("#")[0]).exists(), target
    assert metadata["description"](None) == (ROOT / "README.md").read_text("utf8")
    assert metadata["urls"](address)["Issues"] == f"{address}/issues" and metadata["urls"](None) == {}


@pytest.mark.parametrize(
    "remote", ["git@host.org:owner/name.git", "https://host.org/owner/name", "/srv/name.git", None]
)
def test_the_address_is_that_of_the_clones_remote(metadata, tmp_path, monkeypatch, remote):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if remote is not None:
        subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    monkeypatch.setitem(metadata, "ROOT", tmp_path)
    expected = None if remote in (None, "/srv/name.git") else "https://host.org/owner/name"
    assert metadata["repository"]() == expected
