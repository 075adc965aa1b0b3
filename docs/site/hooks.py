"""What mkdocs makes here of other files: the home page of README.md, the tour of the notebook, the API of docstrings.

Links to files outside docs/ lead to the repository, if its address is known (the clone's remote), else they are plain.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
# Room → heading, in the order of the page; the first that a name's module begins with.
SECTIONS = {
    "specheads.models": "Models with a head",
    "specheads.decoding.generation": "Generating",
    "specheads.decoding.drafters": "Drafters",
    "specheads.decoding.planner": "Trees",
    "specheads.decoding.acceptance": "Acceptance rules",
    "specheads.heads": "Heads",
    "specheads.training": "Training",
    "specheads.data": "Data",
    "specheads.compat": "In a model's own generate()",
    "specheads.decoding": "Parts of the loop",
}


def remote():
    """The repository's address on the web, or None."""
    done = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.fullmatch(r"(?:https://|git@)([\w.-]+)[:/]([\w./-]+?)(?:\.git)?", done.stdout.strip())
    return f"https://{found[1]}/{found[2]}" if found else None


def on_config(config):
    config.repo_url = remote()
    return config


def on_files(files, config):
    """Add the pages that are made of other files."""
    for name, text in {"index.md": home(), "tour.md": tour(), "api.md": api()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    return outward(markdown, Path(page.file.src_uri).parent, config.repo_url)


def home():
    """README.md, whose links to docs/ lead to pages."""
    text = (ROOT / "README.md").read_text("utf8")
    return _LINK.sub(lambda link: f"{link[1]}({_from_docs(link[2])})", text)


def tour():
    """The notebook examples/tour.ipynb with what it printed."""
    parts = []
    for cell in json.loads((ROOT / "examples" / "tour.ipynb").read_text("utf8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "]("))
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"]).strip("\n")
        if printed:
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def api():
    """A page of every public name, by room, each with its docstring."""
    import specheads

    sections = {title: [] for title in SECTIONS.values()}
    for name in sorted(specheads.__all__, key=str.lower):
        public = getattr(specheads, name)
        room = next(room for room in SECTIONS if public.__module__.startswith(room))
        sections[SECTIONS[room]].append(f"{public.__module__}.{public.__qualname__}")
    parts = ["# API", "Every name here is one of `specheads`: `specheads.generate`, `from specheads import SpecModel`."]
    for title, names in sections.items():
        parts.append(f"## {title}")
        parts += [f"::: {name}\n    options:\n      heading_level: 3" for name in names]
    return "\n\n".join(parts) + "\n"


def outward(markdown, folder, address):
    """The page with links to files of the repository outside docs/ made absolute, or plain text without an address.

    folder: of the page, in docs/. A link to what is not there stays, for mkdocs to refuse.
    """

    def link(found):
        target, _, anchor = found[2].partition("#")
        path = (ROOT / "docs" / folder / target).resolve()
        if (
            "://" in found[2]
            or not target
            or not path.exists()
            or (path.is_relative_to(ROOT / "docs") and path.is_file())
        ):
            return found[0]
        if address is None:
            return found[1][1:-1]
        return f"{found[1]}({address}/blob/main/{path.relative_to(ROOT).as_posix()}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, markdown)


def _from_docs(target):
    if "://" in target or target.startswith("#"):
        return target
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
