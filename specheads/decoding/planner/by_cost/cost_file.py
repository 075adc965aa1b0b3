"""The file that `specheads tune` writes: step costs of one base, head and machine; and the shipped default curves."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from specheads.decoding.planner.by_cost.curves import StepCosts
from specheads.files import write_whole
from specheads.version import __version__

FORMAT = 1
_MAX_BYTES = 2**20
_log = logging.getLogger(__name__)


def _versions() -> dict[str, str]:
    """Versions of the software that decides how long a step takes."""
    return {"torch": str(torch.__version__), "specheads": __version__}


@dataclass(frozen=True)
class CostKey:
    """What measured costs hold for. base: digest of its fingerprint; head: digest of its options, "none" without one;
    device: its name and, for a CPU, the number of threads; compiled: is the step compiled?"""

    base: str
    head: str
    device: str
    dtype: str
    compiled: bool = False

    @property
    def file_name(self) -> str:
        rest = digest([self.device, self.dtype, self.compiled])
        return f"{self.base}-{self.head}-{rest}.json"


@dataclass(frozen=True)
class CostTable:
    """Step costs by batch size. acceptance: by depth and rank, the share of drafts of that rank that were right given
    that all drafts above them were; empty if not measured. title: for messages. versions: those that measured it."""

    key: CostKey | None
    batches: Mapping[int, StepCosts]
    acceptance: tuple[tuple[float, ...], ...] = ()
    title: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=_versions, compare=False)

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("a table of step costs needs those of one batch size at least")
        for shares in self.acceptance:
            if not shares or min(shares) < 0 or sum(shares) > 1 + 1e-6:
                raise ValueError(
                    f"acceptance {list(shares)} by rank: give shares of at least 0 that add up to at most 1"
                )

    def for_rows(self, rows: int) -> StepCosts:
        """The costs of this batch size, else of the nearest smaller one, else of the smallest."""
        smaller = [batch for batch in self.batches if batch <= rows]
        return self.batches[max(smaller) if smaller else min(self.batches)]

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        content = {
            "format": FORMAT, "versions": dict(self.versions), "key": None if self.key is None else asdict(self.key),
            "names": dict(self.names), "title": self.title,
            "acceptance": [[round(share, 4) for share in row] for row in self.acceptance],
            "batches": {str(batch): costs.to_dict() for batch, costs in sorted(self.batches.items())},
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, *keys: CostKey) -> CostTable:
        """keys: the costs must hold for one of them, with a warning if other versions measured them; none given: any
        costs will do.

        OSError if the file cannot be read; ValueError, in one line, if it is no table of costs or has another key.
        """
        try:
            with open(path, "rb") as file:
                content = json.loads(file.read(_MAX_BYTES))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, and this version reads {FORMAT}")
            batches = {int(n): StepCosts.from_dict(int(n), costs) for n, costs in content["batches"].items()}
            acceptance = tuple(tuple(map(float, row)) for row in content["acceptance"])
            own = None if content["key"] is None else CostKey(**content["key"])
            versions = content.get("versions") if isinstance(content.get("versions"), dict) else {}
            table = cls(own, batches, acceptance, str(content["title"]), dict(content["names"]), versions)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise ValueError(f"{path} is no file of `specheads tune` ({reason}); tune again") from error
        if keys and table.key not in keys:
            held = {} if table.key is None else asdict(table.key)
            name, value = next((n, v) for n, v in asdict(keys[0]).items() if held.get(n) != v)
            raise ValueError(
                f"{path} holds costs for {name} {held.get(name)!r}, not {value!r}; run `specheads tune` here"
            )
        if keys and table.versions != _versions():
            then, now = table.measured_with, _spelled(_versions())
            _log.warning("%s was measured with %s, and this is %s: run `specheads tune` again", path, then, now)
        return table

    @property
    def measured_with(self) -> str:
        """The versions as text, for messages."""
        return _spelled(self.versions)


def _spelled(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions.get(name, '?')}" for name in _versions())


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def costs_dir() -> Path:
    """Where tune files are kept: beside Hugging Face's cache, `HF_HOME`/specheads/costs."""
    return Path(constants.HF_HOME) / "specheads" / "costs"


@cache
def shipped_costs(device_type: str, *, compiled: bool = False, large: bool = False) -> CostTable:
    """The curves shipped for this device type; everything but a CPU gets those of a GPU. large: is the base larger than
    a processor's caches? Then reading it takes most of a step, however many tokens it verifies."""
    name = "gpu" if device_type != "cpu" else "cpu_large" if large else "cpu"
    return CostTable.load(Path(__file__).with_name("shipped") / f"{name}{'_compiled' if compiled else ''}.json")


def device_name(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3`, or `AMD EPYC 9V74, 2 threads`: threads change what a step costs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


@cache
def cpu_name() -> str:
    try:
        for entry in Path("/proc/cpuinfo").read_text("utf8").splitlines():
            if entry.startswith("model name"):
                return entry.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
