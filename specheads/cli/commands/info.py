"""`specheads info PATH`: what a head checkpoint, an export, or the MTP modules in a model's own checkpoint contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specheads.audit.certificates.certificate import lines_of
from specheads.cli.app import output
from specheads.cli.hanging import print_hanging
from specheads.cli.options.checkpoints import InfoOptions
from specheads.decoding.planner.by_cost import CostTable, costs_dir
from specheads.heads import HEADS
from specheads.hub import did_you_mean, refuse_absent_shipped
from specheads.models import saved_head
from specheads.models.base.state_size import state_size
from specheads.models.costs import cost_files
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.importing import ForeignCheckpoint, find_foreign

_UNITS = {
    "parameters": ("parameters", ",d"), "megabytes": ("size (MB)", ".2f"),
    "draft_vocabulary": ("draft vocabulary (tokens)", ",d"),
}  # fmt: skip


def run(options: InfoOptions) -> None:
    output(checkpoint_record(options.path), show, options.as_json)


def checkpoint_record(path: Path) -> dict[str, Any]:
    """What the head checkpoint in the directory `path` contains. CheckpointError if it is not a checkpoint."""
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the folder of a checkpoint")
    if not path.is_dir():
        refuse_absent_shipped(str(path))
        hint = did_you_mean(str(path), "model")
        raise CheckpointError(f"{path} is not a directory{hint}; give one that save_pretrained() wrote")
    foreign = find_foreign(path)
    if foreign is not None:
        return _shipped_record(path, foreign) if foreign.within_base else _exported_record(path, foreign)
    saved = saved_head.read(path)
    options = {name: value for name, value in saved.head.to_dict().items() if name != "kind"}
    weights = [t for t in saved.tensors.values() if t.is_floating_point()]
    tap = options.get("tap")
    return {
        "kind": saved.head.kind,
        "base": saved.config.base_model_name_or_path,
        "base_revision": saved.config.base_revision,
        "base_fingerprint": saved.config.base_fingerprint,
        "parameters": sum(t.numel() for t in weights),
        "dtype": sorted({str(t.dtype).removeprefix("torch.") for t in weights}),
        "megabytes": round(_megabytes(path), 2),
        "tapped_layers": list(options.get("taps") or ([] if tap is None else [tap])),
        "draft_vocabulary": options.get("draft_vocab_size") or options.get("vocab_size"),
        "options": options,
        "step_costs": _cost_lines(saved.config.base_fingerprint, saved.head.to_dict()),
        **_recurrent_states(path, saved.config.base_model_name_or_path, saved.config.base_revision),
    }


def _exported_record(path: Path, foreign: ForeignCheckpoint) -> dict[str, Any]:
    """A head in another program's format, and what was certified of it. Its options are known only beside its base."""
    return {
        "kind": foreign.form.kind,
        "format": foreign.form.title,
        "base": foreign.base_name,
        **_sizes(foreign.files),
        "certificate": lines_of(path),
        "read_next": f"`specheads import {path} OUT --base BASE` makes it a head that decodes here",
    }


def _sizes(files: Files) -> dict[str, Any]:
    weights = [t for t in files.shapes.values() if t.is_floating_point()]
    return {
        "parameters": sum(t.numel() for t in weights),
        "dtype": sorted({str(t.dtype).removeprefix("torch.") for t in weights}),
        "megabytes": round(sum(t.numel() * t.element_size() for t in weights) / 1e6, 2),
    }


def _shipped_record(path: Path, foreign: ForeignCheckpoint) -> dict[str, Any]:
    """The MTP modules in a target's own checkpoint in the directory `path`."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
        head = foreign.head_config(base)
        taps = HEADS[head.kind](head).layers
    options = {name: value for name, value in head.to_dict().items() if name != "kind"}
    return {
        "kind": head.kind,
        "base": f"the model in this directory ({config.model_type}), whose checkpoint holds the modules",
        **_sizes(foreign.part),
        "tapped_layers": list(taps),
        "draft_vocabulary": options.get("vocab_size"),
        "options": options,
        **_recurrent_states(path, "."),
    }


def _recurrent_states(path: Path, base: str | None, revision: str | None = None) -> dict[str, str]:
    """The memory that a hybrid base's recurrent states take during generation, if its config is on this machine."""
    if not base:
        return {}
    source = path / base if base.startswith(".") else base  # a local name is relative to the checkpoint
    try:
        size = state_size(AutoConfig.from_pretrained(source, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not on this machine, or unknown to this transformers version
        return {}
    return {} if size is None else {"recurrent_states": size.line()}


def _cost_lines(base_fingerprint: dict[str, Any], head: dict[str, Any]) -> list[str]:
    """A line for each file of step costs that draft="auto" would use for this head with the base it was trained for."""
    lines = []
    for path in cost_files(base_fingerprint, head):
        try:
            table = CostTable.load(path)
        except ValueError as error:
            lines.append(str(error))
            continue
        assert table.key is not None
        compiled = ", compiled" if table.key.compiled else ""
        batches = ", ".join(map(str, sorted(table.batches)))
        lines.append(f"{path} ({table.key.device}, {table.key.dtype}{compiled}; batch {batches})")
    return lines or [f"shipped ones; `specheads tune` measures those of this machine, into {costs_dir()}"]


def show(record: dict[str, Any]) -> None:
    """Print the record on stdout, one line per value; the values of a table are indented below its name."""
    width = max(len(_UNITS.get(name, (name,))[0]) for name, value in record.items() if not isinstance(value, dict))
    for name, value in record.items():
        if isinstance(value, dict) and value:
            print(name.replace("_", " "))
            known = {k: v for k, v in value.items() if v is not None}
            inner = max(map(len, known), default=0)
            for k, v in known.items():
                print_hanging(f"  {k:<{inner}}  {_shown(v)}", inner + 4)
            continue
        if name in _UNITS and value is not None:
            name, value = _UNITS[name][0], f"{value:{_UNITS[name][1]}}"
        if value is None:
            value = "none"
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        print_hanging(f"{name.replace('_', ' '):<{width}}  {value}", width + 2)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{len(value)} values, which --json shows"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _megabytes(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) / 1e6
