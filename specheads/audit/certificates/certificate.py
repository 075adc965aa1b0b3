"""A certificate: what an audit of an exported head in its engine found, in certificate.json beside the head."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specheads.audit.acceptance import COMPARED, compare
from specheads.audit.base import Base
from specheads.audit.certificates.engines import Engine, Exported
from specheads.audit.run import audit
from specheads.audit.settings import Settings
from specheads.audit.verdict import Verdict
from specheads.audit.watch import AuditConfig
from specheads.files import write_whole
from specheads.models.files import MAX_JSON
from specheads.models.formats.export.gguf_files import TARGET
from specheads.models.spec_model import SpecModel
from specheads.terminal import Report
from specheads.version import __version__

CERTIFICATE, README = "certificate.json", "README.md"
SAMPLED = 1 << 20  # bytes at each end of a base's weights that its digest reads
WAYS = (Settings(0.0), Settings(1.0))


def certify(
    engine: Engine, exported: Exported, base: Base, prompts: Sequence[list[int]], *,
    ways: Sequence[Settings] = WAYS, config: AuditConfig | None = None, report: Report | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run the export in the engine and audit it; the head is read back from the export for the acceptance here.

    ways: to ask; each gets the base's end tokens. Returns what is written of this engine: engine, versions, options,
    drafted (tokens a step), date, specheads, the audit's verdict, alpha and results, and acceptance (None if the engine
    does not count). EngineError if it does not run.
    """
    versions = engine.versions()
    asked = [replace(way, eos=base.eos) for way in ways]
    with engine.serve(exported) as client:
        client.name = engine.name
        scorer = base.scorer(engine.served(base.served, exported))
        found = audit(scorer, client, prompts, asked, config, report, base.tokenizer)
        model: Any = SpecModel.from_pretrained(exported.folder, base=base.model)
        greedy = Settings(0.0, max_tokens=2 * asked[0].max_tokens, eos=base.eos)
        comparison = compare(client, model, prompts[:COMPARED], greedy)
    return {
        "engine": engine.name, "versions": versions, "options": engine.options, "drafted": exported.depth,
        "date": datetime.now(UTC).date().isoformat(), "specheads": __version__,
        **{name: value for name, value in found.to_dict().items() if name != "server"},
        "acceptance": comparison.to_dict() if comparison else None,
    }  # fmt: skip


def write(exported: Exported, base: Base, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write certificate.json into the export, and quote it in its README. Returns what was written."""
    folder = exported.folder
    record = {
        "head": {path.name: _digest(path) for path in _files(folder)},
        "base": {
            "name": exported.base, "revision": getattr(base.model.config, "_commit_hash", None),
            "digest": base_digest(exported.base),
        },
        "certificates": list(found),
    }  # fmt: skip
    write_whole(folder / CERTIFICATE, json.dumps(record, indent=2, allow_nan=False) + "\n")
    readme = folder / README
    write_whole(readme, f"{readme.read_text('utf8')}\n{quote(record)}")
    return record


def quote(record: dict[str, Any]) -> str:
    """A section of a README."""
    lines = ["## Certificate", ""]
    for one in record["certificates"]:
        lines += [f"- {summary(one)}"]
        lines += [f"  - {result['settings']}: {line}" for result in one["results"] for line in _reasons(result)]
    lines += [
        "", f"{CERTIFICATE} has the evidence and the hashes of head and base. `specheads info` says whether they still "
        "fit. A right server is called not lossless with a chance of at most "
        f"{max(one['alpha'] for one in record['certificates']):g}.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def summary(one: dict[str, Any]) -> str:
    """One engine's certificate in a line."""
    version = next(version for name, version in one["versions"].items() if name != "python")
    verdicts = ", ".join(
        f"{result['settings']} **{result['verdict']}**" if result["verdict"] == Verdict.NOT_LOSSLESS
        else f"{result['settings']} {result['verdict']}"
        for result in one["results"]
    )  # fmt: skip
    said = f"{one['engine']} {version}, {one['drafted']} drafted tokens a step ({one['date']}): {verdicts}"
    if (accepted := one["acceptance"]) is None:
        return f"{said}; it does not say what it accepted"
    there, here = (accepted[side]["tokens_per_step"] for side in ("server", "here"))
    agrees = "" if accepted["equal"] else ", which is too far apart"
    return f"{said}; {there:.2f} tokens a step there, {here:.2f} here{agrees}"


def _reasons(result: dict[str, Any]) -> list[str]:
    if result["mistake"]:
        return [f"this is {result['mistake']}"]
    return list(result["evidence"]) if result["verdict"] == Verdict.NOT_LOSSLESS else []


def lines_of(folder: Path) -> list[str]:
    """What the certificate in this folder says, and whether its hashes still fit; [] if there is none."""
    path = folder / CERTIFICATE
    if not path.is_file():
        return []
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError("too long")
        record = json.loads(path.read_text("utf8"))
        said, differ = [summary(one).replace("**", "") for one in record["certificates"]], changes(folder, record)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return [f"{path} is damaged, or of another version: certify the head again"]
    return [f"no longer of these files, certify the head again: {', '.join(differ)}"] * bool(differ) + said


def changes(folder: Path, record: dict[str, Any]) -> list[str]:
    """What is not as it was: files of the head, and the base if it is a folder on this machine."""
    differ = [
        f"{name} is missing" if not (folder / name).is_file() else f"{name} has changed"
        for name, digest in record["head"].items()
        if not (folder / name).is_file() or _digest(folder / name) != digest
    ]
    base = record["base"]
    known, now = base["digest"], base_digest(str(base["name"]))
    return differ + [f"the base {base['name']} has changed"] * bool(known and now and known != now)


def base_digest(name: str) -> str | None:
    """SHA-256 of a folder's config.json and of the names, sizes and both ends of its weights; None for a hub id, whose
    revision tells. Not of all bytes, since a base has many."""
    folder, total = Path(name), hashlib.sha256()
    if not folder.is_dir():
        return None
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        if path.is_file():
            size = path.stat().st_size
            total.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as file:
                total.update(file.read(SAMPLED))
                file.seek(max(0, size - SAMPLED))
                total.update(file.read())
    return total.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Those of the head: the base's GGUF file is made of the base."""
    left_out = (README, CERTIFICATE, TARGET)
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.is_symlink() and p.name not in left_out)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
