"""docs/training.md: its commands and its Python block, run as they stand in a folder like a clone; and its links."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.markdown import blocks
from tests.support.paths import ROOT

TUTORIAL, REFERENCE = ROOT / "docs" / "training.md", ROOT / "docs" / "training-reference.md"


def anchors(text):
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [TUTORIAL, REFERENCE], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    links = re.findall(r"\]\(([^)]*)\)", page.read_text("utf8"))
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text("utf8")), link


@pytest.mark.slow
def test_the_tutorial_ends_with_a_head_that_decodes(tmp_path):
    for name in ("checkpoints", "recipes", "train"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = TUTORIAL.read_text("utf8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    known = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True}
    *_, decoded = [subprocess.run(["bash", "-e", "-c", block], **known) for block in blocks(text, "bash")]
    found = re.search(r"accepted length (\d\.\d+)", decoded.stderr)
    assert decoded.stdout.strip()
    assert found and float(found[1]) > 1.3
    (python,) = blocks(text, "python")
    assert "def read_json(path):" in subprocess.run([sys.executable, "-c", python], **known).stdout
