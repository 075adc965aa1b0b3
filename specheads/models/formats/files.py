"""The files of a checkpoint, ours or foreign. Names, shapes and dtypes can be checked before any tensor is in memory.

No file is trusted: a damaged or hostile one raises CheckpointError, which says what is wrong.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from torch import Tensor
from transformers.utils import cached_file

from specheads.hub import hub_options, may_be_repository
from specheads.models.files import (
    CONFIG,
    WEIGHTS,
    CheckpointError,
    damaged_error,
    meta_tensor,
    read_header,
    read_names,
    read_table,
    read_tensors,
)
from specheads.options import Suggestion, reason, shortened, shown

INDEX, PICKLE_INDEX = f"{WEIGHTS}.index.json", "pytorch_model.bin.index.json"
_MAX_FILES = 64  # files
_MAX_BYTES = 64 << 20  # of an index; one of 100,000 tensors has some 10 million
_NAME = re.compile(r"\w[\w. -]{0,200}\.safetensors")  # of a file beside the index: no path, no drive
SAFE = (WEIGHTS, INDEX, "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt", PICKLE_INDEX)
# The only calls that a pickled dict of plain tensors needs. torch.load(weights_only=True) allows more, such as
# bytearray(10**11).
_CALLED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch (?!Untyped|Typed)\w+Storage"
)
_OTHER_CALLS = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"}


class Files:
    """A checkpoint: a directory or a hub id. hub: options of a hub id, such as revision, subfolder and token.

    allow_pickle: also read pickles, with torch.load(weights_only=True), which builds tensors and runs no code in them.
    """

    def __init__(self, source: Any, hub: dict[str, Any] | None = None, allow_pickle: bool = False) -> None:
        self.source, self.allow_pickle = source, allow_pickle
        self.hub = hub or {}
        folder = Path(source) / self.hub.get("subfolder", "")
        self.folder = folder if folder.is_dir() else None  # None: it is on the hub

    def __str__(self) -> str:
        return str(self.source)

    def find(self, name: str) -> Path | None:
        """The path of one file of the checkpoint; None if it does not exist. CheckpointError if it cannot be downloaded
        or stored."""
        if self.folder is not None:
            return self.folder / name if (self.folder / name).is_file() else None
        if not may_be_repository(str(self.source)):
            return None
        try:
            options = {**hub_options(self.source, **self.hub), **self.hub}
        except FileNotFoundError:
            return None
        try:
            path = cached_file(str(self.source), name, _raise_exceptions_for_missing_entries=False, **options)
        except OSError as error:
            absent = EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
            if isinstance(error.__cause__, absent) and not isinstance(error.__cause__, GatedRepoError):
                return None
            raise CheckpointError(f"{name} of {self.source} could not be fetched: {reason(error)}") from error
        return None if path is None else Path(path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; {} if it is missing or not a JSON object. CheckpointError if it is huge."""
        path = self.find(CONFIG)
        return {} if path is None else read_table(path) or {}

    @cached_property
    def weights(self) -> Path | None:
        """The file with the tensors, or the index of several such files: safetensors if available, else a pickle."""
        return next((path for name in (*SAFE, *PICKLES) if (path := self.find(name)) is not None), None)

    @property
    def pickled(self) -> bool:
        return self.weights is not None and self.weights.name not in SAFE

    @cached_property
    def shapes(self) -> dict[str, Tensor]:
        """Every tensor on the meta device: its shape and dtype, without its values. CheckpointError if a name is there
        with and without the prefix."""
        shapes = self._stored_shapes
        if twice := [name for name in shapes if self._prefix and self._prefix + name in shapes]:
            raise CheckpointError(f"{self} has both {shortened(twice[0])} and {shortened(self._prefix + twice[0])}")
        return {name.removeprefix(self._prefix): t for name, t in shapes.items()}

    @cached_property
    def _stored_shapes(self) -> dict[str, Tensor]:
        if self.pickled:
            return {
                name: meta_tensor(self.weights, name, tuple(t.shape), t.dtype) for name, t in self._unpickled.items()
            }
        assert self.weights is not None
        if self._index is None:
            return read_header(self.weights)[0]
        refuse_many(self.weights, self._index)
        shapes: dict[str, Tensor] = {}
        for name, path in self._shards.items():
            part = read_header(path)[0]
            check_shard(self.weights, name, [t for t, file in self._index.items() if file == name], part)
            shapes |= part
        return shapes

    @cached_property
    def names(self) -> Collection[str]:
        """The names of all tensors, of any dtype. If there is an index, no other file is downloaded.

        For a pickle, which is not run: every string in it, which includes the names."""
        return {name.removeprefix(self._prefix) for name in self._stored_names}

    @cached_property
    def _prefix(self) -> str:
        """What is left out of the tensors' names: the class's "model.", before an EAGLE head's fc as NeMo Automodel
        writes it. No complete model has such a tensor."""
        return "model." if "model.fc.weight" in self._stored_names and "fc.weight" not in self._stored_names else ""

    @cached_property
    def _stored_names(self) -> Collection[str]:
        if self._index is not None:
            return self._index
        assert self.weights is not None
        return _texts_in(self.weights) if self.pickled else read_names(self.weights)

    def tensor(self, name: str) -> Tensor:
        """A copy of one tensor, independent of the file. First check `shapes` against what is expected."""
        if self._prefix and name not in self._stored_shapes:
            name = self._prefix + name
        if self.pickled:
            return self._unpickled[name].clone(memory_format=torch.contiguous_format)
        path = self.weights if self._index is None else self._shards[self._index[name]]
        assert path is not None
        return read_tensors(path, [name])[name].clone()

    @cached_property
    def _index(self) -> dict[str, str] | None:
        """Tensor name → name of its file, if the tensors are in several files; None if they are in one."""
        if self.weights is None or self.weights.name not in (INDEX, PICKLE_INDEX):
            return None
        return read_index(self.weights)[0]

    @property
    def _wanted(self) -> Collection[str]:
        """The names of the tensors that are read."""
        return self._index or ()

    @cached_property
    def _shards(self) -> dict[str, Path]:
        """File name → path, for the files of all tensors that are read. CheckpointError if one is missing."""
        assert self.weights is not None and self._index is not None
        refuse_paths(self.weights, self._index, self._wanted)
        paths = {name: self.find(name) for name in sorted({self._index[tensor] for tensor in self._wanted})}
        if missing := [name for name, path in paths.items() if path is None]:
            raise CheckpointError(f"{self.weights} names {missing[0]}, which is not beside it; copy it there too")
        return {name: path for name, path in paths.items() if path is not None}

    @cached_property
    def _unpickled(self) -> dict[str, Tensor]:
        path = self.weights
        assert path is not None
        if path.name == PICKLE_INDEX:
            raise CheckpointError(f"{path}: pickles in several files are not read; save the head as safetensors")
        self.allow(path)
        return read_pickle(path)

    def allow(self, path: Path) -> None:
        """CheckpointError unless pickles are to be read."""
        if not self.allow_pickle:
            raise CheckpointError(
                f"{path} is a pickle, which can run code; {{allow_pickle}} of `specheads import` or from_pretrained() "
                "reads it with torch.load(weights_only=True), which builds tensors and refuses all else",
                allow_pickle=Suggestion(True),
            )


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch.save() archive by name, memory-mapped. CheckpointError if it holds anything else, or if a
    tensor claims more values than the archive stores."""
    loaded = read_values(path)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not tensors by name")
    for name, tensor in loaded.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: {shortened(name)!r} is not a plain tensor under a name")
        check_plain(path, name, tensor)
    return loaded


def read_values(path: Path) -> Any:
    """What a torch.save() archive of tensors, numbers and tables of them holds, memory-mapped. CheckpointError if its
    pickle asks for anything else."""
    _refuse_calls(path, _program(path))
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a hostile pickle can fail in any way
        raise damaged_error(path, f"{type(error).__name__}: {error}") from error


def check_plain(path: Path, name: str, tensor: Any) -> None:
    """CheckpointError unless it is a dense tensor whose values the archive stores."""
    plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.is_quantized:
        raise CheckpointError(f"{path}: {shortened(name)!r} is not a plain tensor under a name")
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise CheckpointError(f"{path}: {shortened(name)} has shape {tuple(tensor.shape)} over fewer values than that")


def _program(path: Path) -> bytes:
    """The pickle in a torch.save() archive. CheckpointError for what torch.save() does not write."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            inside = [entry for entry in archive.infolist() if entry.filename.lower().endswith("data.pkl")]
            program = archive.read(inside[0]) if len(inside) == 1 and not packed else b""
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} is damaged, cut short, or older than torch 1.6 ({reason(error)}); copy it again, or save it "
            "again as safetensors"
        ) from error
    if packed:  # torch.save never compresses, and compressed data may expand to any size
        raise CheckpointError(
            f"{path} holds compressed entries ({shortened(packed[0])}), which torch.save() does not write"
        )
    return program


def _codes(path: Path, program: bytes) -> list[tuple[str, Any]]:
    """The opcodes of a pickle as (name, argument). Nothing is run."""
    try:
        return [(code.name, argument) for code, argument, _ in pickletools.genops(program)]
    except (ValueError, UnicodeError) as error:
        raise damaged_error(path, f"its pickle cannot be read: {error}") from error


def _texts_in(path: Path) -> set[str]:
    return {argument for name, argument in _codes(path, _program(path)) if "UNICODE" in name}


def _refuse_calls(path: Path, program: bytes) -> None:
    """CheckpointError if a pickle calls anything that a dict of plain tensors does not need."""
    for name, argument in _codes(path, program):
        if name in _OTHER_CALLS or (name == "GLOBAL" and not _CALLED.fullmatch(str(argument))):
            called = str(argument).replace(" ", ".") if name == "GLOBAL" else name
            raise CheckpointError(f"{path}: its pickle calls {shown(called)}, which plain tensors by name do not need")


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Tensor name → name of its file, and the metadata, from an index. CheckpointError if the file is not an index."""
    read = read_table(path, _MAX_BYTES) or {}
    weight_map, metadata = read.get("weight_map"), read.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} is not an index of tensors: it has no weight_map of names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path} has {shortened(tensor)} in {shown(name)}; expected the name of a file")
    return weight_map, metadata if isinstance(metadata, dict) else {}


def refuse_paths(path: Path, index: dict[str, str], tensors: Collection[str]) -> None:
    """CheckpointError if the index puts one of these tensors anywhere but in a file beside itself."""
    for tensor in tensors:
        name = index[tensor]
        if not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{path} has {shortened(tensor)} in {shown(name)}; expected the name of a .safetensors file beside it"
            )


def refuse_many(path: Path, index: dict[str, str]) -> None:
    """CheckpointError if the index names more files than any head has."""
    if (count := len(set(index.values()))) > _MAX_FILES:
        raise CheckpointError(f"{path} names {count} files; a head has at most {_MAX_FILES}")


def check_shard(index: Path, name: str, claimed: Collection[str], held: Collection[str]) -> None:
    """CheckpointError unless a file holds exactly the tensors that the index assigns to it: readers load all it has."""
    for what, names in (("lacks", set(claimed) - set(held)), ("also holds", set(held) - set(claimed))):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{index}: {name} {what} {shortened(min(names))}{more}, as the index has it; copy both again"
            )
