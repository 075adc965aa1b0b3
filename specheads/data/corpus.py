"""The corpus that comes with every Python: the standard library's source (PSF licence), with held-out files."""

from __future__ import annotations

import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

_MIN_CHARS, _MAX_CHARS = 200, 400_000
_HELD_OUT_EVERY = 20
_GENERATED = re.compile(r"automatically generated|auto-?generated|generated (automatically |by |from )", re.IGNORECASE)
_NOT_THE_PACKAGES_OWN = {"tests", "test", "testing", "_vendor", "vendor", "vendored"}  # folder names

Split = Literal["train", "held_out"]


def checkpoints_dir() -> Path:
    """The folder of the shipped base model and heads. Raises FileNotFoundError if the package came without it."""
    folder = Path(__file__).resolve().parents[2] / "checkpoints"
    if not (folder / "base" / "config.json").is_file():
        raise FileNotFoundError(
            f"no shipped checkpoints at {folder}: they come with the repository, not with the wheel; name a model of "
            "your own, or `specheads demo` trains a base and a head"
        )
    return folder


def stdlib_files() -> dict[str, Path]:
    """Relative name → path of each standard-library source file of this interpreter, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = ("site-packages", "dist-packages", "lib2to3/tests/data")
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not any(part in name for part in skip) and "bad" not in path.name:
            files[name] = path
    return files


def read_text(path: Path) -> str | None:
    """The file's text, or None if it is not UTF-8 or is too short or too long to learn from."""
    try:
        text = path.read_text("utf8")
    except UnicodeDecodeError:
        return None
    return text if _MIN_CHARS <= len(text) <= _MAX_CHARS else None


def default_held_out() -> list[str]:
    """Every 20th usable file: the rule behind checkpoints/base/held_out.txt."""
    usable = [name for name, path in stdlib_files().items() if read_text(path) is not None]
    return usable[::_HELD_OUT_EVERY]


def held_out_names() -> list[str]:
    """The names of files that no shipped model or head was trained on, as recorded beside the shipped base model. If
    none is shipped: the default rule's, as for the base that `specheads demo` then trains."""
    try:
        folder = checkpoints_dir()
    except FileNotFoundError:
        return default_held_out()
    return (folder / "base" / "held_out.txt").read_text("utf8").split()


def texts(split: Split, held_out: list[str] | None = None) -> Iterator[tuple[str, str]]:
    """(name, text) of each standard-library file of the split, in path order."""
    names = set(held_out_names() if held_out is None else held_out)
    for name, path in stdlib_files().items():
        if (name in names) == (split == "held_out") and (text := read_text(path)) is not None:
            yield name, text


def texts_of(paths: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    """(name, text) of each given file, and of each .py file in the given folders, in path order.

    Raises FileNotFoundError for a path that does not exist, and ValueError for one without usable text.
    """
    for source in map(Path, paths):
        if not source.exists():
            raise FileNotFoundError(f"--data {source}: no such file or folder")
        files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
        usable = [(str(path), text) for path in files if (text := read_text(path)) is not None]
        if not usable:
            raise ValueError(
                f"--data {source}: no {'.py file in it' if source.is_dir() else 'file'} of {_MIN_CHARS} to "
                f"{_MAX_CHARS} characters in UTF-8; name files or folders of Python source"
            )
        yield from usable


def texts_of_packages(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each .py file of an installed package's own code, in path order.

    Left out: tests, copies of other packages (`_vendor`), and files whose first lines say that they are generated.
    Raises ValueError for a package that is not installed or has no usable text.
    """
    for package in names:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(f"--packages {package}: not installed here; install it, or leave it out") from None
        usable = []
        for file in sorted(files):
            if file.suffix == ".py" and ".." not in file.parts and not _NOT_THE_PACKAGES_OWN.intersection(file.parts):
                text = read_text(Path(str(file.locate())))
                if text is not None and not _GENERATED.search(text[:1000]):
                    usable.append((file.as_posix(), text))
        if not usable:
            raise ValueError(f"--packages {package}: no .py file of its own; name packages of Python source")
        yield from usable
