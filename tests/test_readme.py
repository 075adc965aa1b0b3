"""The README's first lines, run as they are written but for the names of the model and the data."""

import json
import re
from pathlib import Path

import pytest
from snippets import blocks

from specheads import corpus

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf8")


def test_readme_snippet_runs(tmp_path, monkeypatch, capsys):
    snippet = blocks(README, "python")[0]
    assert len([line for line in snippet.splitlines() if line]) <= 10
    chats = [
        [{"role": "user", "content": f"show me {i}"}, {"role": "assistant", "content": f"def f{i}(x):\n    return {i}"}]
        for i in range(3)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(snippet.replace("Qwen/Qwen3-8B", str(corpus.checkpoints_dir() / "base")), made)
    assert "def main(" in capsys.readouterr().out
    assert made["model"].base is made["base"], "a second base was loaded"
    elsewhere = re.search(r"in another process (.*) loads the base too", snippet)[1]
    assert eval(f"specheads.{elsewhere}", made).base is not made["base"]


def test_readme_names_files_that_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    commands = re.findall(r"(?:train|recipes|benchmarks|docs|checkpoints)/[\w/.-]*\w", README)
    assert links
    for name in {*links, *commands}:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", ".ci/run", "docs/LOG.md"])
def test_the_house_is_furnished(name):
    assert (ROOT / name).is_file()
