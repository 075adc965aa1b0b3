"""specheads doctor: is everything installed, and what will be fast or slow?"""

from __future__ import annotations

import platform
from typing import Any

from specheads.cli.app import output
from specheads.cli.doctor import requirements
from specheads.cli.options.checkpoints import DoctorOptions


def run(options: DoctorOptions) -> int:
    record = examine(options.network)
    output(record, lambda record: print("\n".join(lines(record))), options.as_json)
    return int(bool(record["problems"]))


def examine(network: bool) -> dict[str, Any]:
    """The packages, the problems to fix and, if there are none, a record of the machine."""
    needed = requirements.required()
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
        "optional": [package.record() for package in requirements.optional()],
        "problems": problems,
    }


def lines(record: dict[str, Any]) -> list[str]:
    text = ["required"] + [f"  {_mark(entry)}" for entry in record["required"]]
    text += ["optional"]
    for entry in record["optional"]:
        text.append(f"  {_mark(entry)}" + ("" if entry["ok"] else f": {entry['install']}"))
    machine = {name: value for name, value in record.items() if name not in ("required", "optional", "problems")}
    text += ["here"] + [f"  {name.replace('_', ' '):<19}  {_shown(value)}" for name, value in machine.items()]
    verdict = (
        "not usable: " + "; ".join(record["problems"]) if record["problems"] else "usable: everything required is here"
    )
    return [*text, verdict]


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
