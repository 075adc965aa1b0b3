"""specheads doctor: is everything installed, and what will be fast or slow?

Packages are looked up without importing one: an import may be what fails.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from specheads.cli.app import output
from specheads.cli.hanging import print_hanging
from specheads.cli.options.checkpoints import DoctorOptions

# What each is for. The versions are those of the package's own metadata, which setup.py writes.
REQUIRED = {
    "torch": "tensors",
    "transformers": "base models and tokenizers",
    "accelerate": "training on several GPUs",
    "safetensors": "checkpoints",
    "numpy": "the choice of automatic drafts",
    "datasets": "training data",
    "peft": "adapters on the base (lora)",
    "pyyaml": "recipes",
    "rich": "tables and colours in the terminal",
    "typer": "this command",
    "prompt_toolkit": "completion and history in chat",
}
OPTIONAL = {
    "deepspeed": "ZeRO: the launch configs accelerate/zero1, zero2 and zero3",
    "bitsandbytes": "bases in 4 or 8 bits (quantize=4bit, quantize=8bit)",
    "openai": "rows that servers answer (self-distillation)",
    "matplotlib": "pictures of benchmarks and training curves",
    "xgrammar": "grammar-constrained generation",
}


def run(options: DoctorOptions) -> int:
    record = examine(options.network)
    output(record, show, options.as_json)
    return int(bool(record["problems"]))


def examine(network: bool) -> dict[str, Any]:
    """The packages, the problems to fix and, if there are none, a record of the machine."""
    needed = packages(REQUIRED)
    problems = [problem for package in needed if (problem := package.problem) is not None]
    machine: dict[str, Any] = {"python": platform.python_version()}
    if not problems:
        try:
            from specheads.cli.doctor.machine import machine_record

            machine = machine_record(network)
        except (ImportError, OSError) as error:  # OSError: a shared library is missing
            problems.append(f"specheads does not load: {' '.join(str(error).split())}")
    return {
        **machine,
        "required": [package.record() for package in needed],
        "optional": [package.record() for package in packages(OPTIONAL)],
        "problems": problems,
    }


def show(record: dict[str, Any]) -> None:
    """Print a line a package and a value; values that are too long for the terminal continue below themselves."""
    for kind in ("required", "optional"):
        print(kind)
        for entry in record[kind]:
            install = f": {entry['install']}" if kind == "optional" and not entry["ok"] else ""
            print_hanging(f"  {_mark(entry)}{install}", 34)
    print("here")
    for name, value in record.items():
        if name not in ("required", "optional", "problems"):
            print_hanging(f"  {name.replace('_', ' '):<19}  {_shown(value)}", 23)
    verdict = "not usable: " + "; ".join(record["problems"]) if record["problems"] else ""
    print_hanging(verdict or "usable: everything required is here", 2)


def _mark(entry: dict[str, Any]) -> str:
    version = entry["version"] or "-"
    old = "" if entry["ok"] or entry["version"] is None else f", older than {entry['least']}"
    return f"{entry['name']:<16} {version + old:<14} {entry['for']}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


@dataclass(frozen=True)
class Package:
    """version: None if it is not installed; least: the oldest version that works, None for any; install: the argument
    for pip."""

    name: str
    purpose: str
    version: str | None
    least: str | None
    install: str

    @property
    def ok(self) -> bool:
        return self.version is not None and (self.least is None or _release(self.version) >= _release(self.least))

    @property
    def problem(self) -> str | None:
        """What is wrong with it, and the command that fixes it; None if nothing is."""
        if self.ok:
            return None
        wrong = "is not installed" if self.version is None else f"{self.version} is older than {self.least}"
        return f"{self.name} {wrong}: pip install '{self.install}'"

    def record(self) -> dict[str, str | bool | None]:
        return {
            "name": self.name, "version": self.version, "least": self.least, "ok": self.ok, "for": self.purpose,
            "install": f"pip install '{self.install}'",
        }  # fmt: skip


def packages(purposes: dict[str, str]) -> list[Package]:
    """What is known of packages: name → purpose."""
    least = _least()
    return [_package(name, purpose, *least.get(name, (None, None))) for name, purpose in purposes.items()]


def _package(name: str, purpose: str, least: str | None, extra: str | None) -> Package:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    install = f"specheads[{extra}]" if extra else f"{name}>={least}" if least else name
    return Package(name, purpose, version, least, install)


def _least() -> dict[str, tuple[str, str | None]]:
    """Package → the oldest version that specheads supports, and the extra that requires it. Empty if specheads is not
    installed but run from a folder."""
    try:
        lines = metadata.requires("specheads") or []
    except metadata.PackageNotFoundError:
        return {}
    least: dict[str, tuple[str, str | None]] = {}
    for line in lines:
        read = re.match(r"([\w.-]+)\s*>=\s*([\d.]+)(?:.*extra == ['\"]([\w-]+)['\"])?", line)
        if read is not None and read[3] != "dev":
            least.setdefault(read[1].lower(), (read[2], read[3]))
    return least


def _release(version: str) -> tuple[int, ...]:
    """2.13.0+cpu → (2, 13), which compares as versions do: no trailing zeros, and nothing after the numbers."""
    numbers = re.match(r"[\d.]*", version)
    parts = [int(part) for part in (numbers[0] if numbers else "").split(".") if part]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)
