"""A base's files in an export of MTP modules: its index without its own MTP modules, and links to the other files."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel
from transformers.utils import cached_file

from specheads.hub import cached_commits, commit_of
from specheads.models.files import CONFIG, WEIGHTS, CheckpointError, read_names
from specheads.models.formats.files import INDEX, read_index

_STEM = "mtp"  # sorts after model*.safetensors, so readers that load every file end up with its tensors
_SOLE = "model-00001-of-00002.safetensors"  # what WEIGHTS is renamed to: readers that find WEIGHTS ignore the index


@dataclass(frozen=True)
class BaseFiles:
    """folder: where the files are; None if the base is in no folder. weights: tensor → name of its file in an export.
    metadata: of the index. unused: files of the folder that hold no tensor of the export."""

    folder: Path | None = None
    weights: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()

    @classmethod
    def of(cls, base: PreTrainedModel) -> Self:
        """CheckpointError if the base's folder has no safetensors, or may be one of several."""
        folder = _folder_of(base)
        if folder is None:
            return cls()
        if (folder / WEIGHTS).is_file():
            return cls(folder, dict.fromkeys(read_names(folder / WEIGHTS), _SOLE))
        if (folder / INDEX).is_file():
            return cls(folder, *read_index(folder / INDEX))
        raise CheckpointError(f"{folder} has no safetensors; save the base again, and export beside that")

    def without(self, names: Collection[str]) -> Self:
        """A copy without these tensors, and without files that hold nothing else."""
        kept = {name: file for name, file in self.weights.items() if name not in names}
        return replace(self, weights=kept, unused=frozenset(self.weights.values()) - frozenset(kept.values()))

    @property
    def new_file(self) -> str:
        """The name of the modules' file: not used by the base, and sorted after all of its files."""
        taken, number = set(self.weights.values()), 1
        while (name := f"{_STEM}{f'_{number}' if number > 1 else ''}.safetensors") in taken:
            number += 1
        return name

    def index(self, module_names: Collection[str]) -> str:
        """The index, as JSON, of the base's tensors and of the modules' tensors with these names."""
        named = {**self.weights, **dict.fromkeys(module_names, self.new_file)}
        return json.dumps({"metadata": self.metadata, "weight_map": dict(sorted(named.items()))}, indent=2) + "\n"

    def links(self) -> dict[str, Path]:
        """The base's files by their names in an export."""
        if self.folder is None:
            return {}
        renamed = {WEIGHTS: _SOLE} if (self.folder / WEIGHTS).is_file() else {}
        passed = {CONFIG, INDEX, "README.md", self.new_file, *renamed.values(), *self.unused}
        return {
            renamed.get(path.name, path.name): path.resolve()
            for path in self.folder.iterdir()
            if path.is_file() and path.name not in passed
        }


def _folder_of(base: PreTrainedModel) -> Path | None:
    """The folder of the base's files, which may be the hub's cache; None if it has none."""
    name = getattr(base, "name_or_path", None)
    if not name:
        return None
    if (Path(name) / CONFIG).is_file():
        return Path(name)
    commit = commit_of(base)
    if commit is None and len(commits := cached_commits(name)) > 1:
        raise CheckpointError(
            f"the hub's cache has {len(commits)} commits of {name}, and nothing says which one this base was loaded "
            f"from; load it from a folder: hf download {name} --revision COMMIT --local-dir FOLDER"
        )
    options: dict[str, Any] = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    try:
        path = cached_file(name, CONFIG, revision=commit, **options)
    except OSError:
        return None
    return None if path is None else Path(path).parent
