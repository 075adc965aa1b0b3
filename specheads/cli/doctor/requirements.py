"""Which packages are installed, too old or missing, without importing one: an import may be what fails."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

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
}
OPTIONAL = {
    "deepspeed": "ZeRO: the launch configs accelerate/zero1, zero2 and zero3",
    "bitsandbytes": "bases in 4 or 8 bits (load_in_4bit, load_in_8bit)",
    "openai": "rows that servers answer (self-distillation)",
    "matplotlib": "pictures of benchmarks and training curves",
    "xgrammar": "grammar-constrained generation",
}


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


def required() -> list[Package]:
    least = _least()
    return [_package(name, purpose, *least.get(name, (None, None))) for name, purpose in REQUIRED.items()]


def optional() -> list[Package]:
    least = _least()
    return [_package(name, purpose, *least.get(name, (None, None))) for name, purpose in OPTIONAL.items()]


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
