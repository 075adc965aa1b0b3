"""`specheads export` and `import`: heads to and from the formats of other programs."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.audit.base import Base
from specheads.audit.certificates.certificate import certify, lines_of, write
from specheads.audit.certificates.engines import Engine, Exported, engine_of
from specheads.audit.verdict import Verdict
from specheads.cli.app import output
from specheads.cli.commands.audit import prompts_of
from specheads.cli.hanging import print_hanging
from specheads.cli.options.checkpoints import ExportOptions, ImportOptions
from specheads.models import export_checks
from specheads.models.base.loading import DTYPES, as_dtype
from specheads.models.files import absolute, refuse_nonempty
from specheads.models.formats import ENGINES
from specheads.models.formats.export.exporting import form_for
from specheads.models.formats.format import Format
from specheads.models.named import tokenizer_of
from specheads.models.spec_model import SpecModel
from specheads.options import refuse_unknown


def export(options: ExportOptions) -> int:
    """Print the export's path, its format and, if asked for, the check's result and certificates. The exit code is 0, 3
    (not lossless) or 4 (undecided)."""
    refuse_unknown([options.to], ENGINES, what="format for --to")
    _check_dtype(options.dtype)
    engines = [engine_of(text) for text in options.certify or ()]
    hf_logging.disable_progress_bar()
    model: Any = SpecModel.from_pretrained(options.model, base=options.base, dtype="auto")
    form = form_for(model.config, model.base, model.head, options.to)
    exported = _exported(model, form, options)
    for engine in engines:
        engine.refuse(exported)
    folder = model.export(
        options.out, options.to, dtype=options.dtype, embeddings=options.embeddings, gguf=options.gguf
    )
    record = {
        "written": str(folder), "form": form.title, "written_for": form.versions, "files": [],
        "read_next": str(folder / "README.md"),
    }  # fmt: skip
    if options.check:
        record["check"] = export_checks.check(folder, model)
    code = 0
    if engines:
        certificate = _certify(engines, exported, model)
        codes = [Verdict(one["verdict"]).exit_code for one in certificate["certificates"]]
        code = next((code for code in (3, 4) if code in codes), 0)
        record["certificate"] = certificate["certificates"] if options.as_json else "; ".join(lines_of(folder))
    record["files"] = sorted(path.name for path in folder.iterdir())
    output(record, show, options.as_json)
    return code


def _exported(model: Any, form: Format, options: ExportOptions) -> Exported:
    name, folder, head = absolute(model.config.base_model_name_or_path), options.out.resolve(), model.head
    depth = head.config.served_depth
    return Exported(
        folder, name, options.to, head.config.kind, as_dtype(options.dtype) or model.base.dtype, depth,
        tuple(head.layers), form.serve(name, str(folder), depth), options.embeddings, options.gguf is not None,
    )  # fmt: skip


def _certify(engines: list[Engine], exported: Exported, model: Any) -> dict[str, Any]:
    """Certificates of these engines, as they were written into the export."""
    base = Base.load(exported.base, tokenizer_of(exported.base), model.base)
    prompts, found = prompts_of(None, base.tokenizer), []
    for engine in engines:
        with terminal.progress(terminal.make_console(stderr=True), f"auditing {engine.name}") as progress:
            found.append(certify(engine, exported, base, prompts, report=progress))
    return write(exported, base, found)


def import_head(options: ImportOptions) -> None:
    """Print what was read, and where it was saved. OUT must be empty: an older run's figures in it would pass for this
    head's."""
    _check_dtype(options.dtype)
    refuse_nonempty(options.out, "import into")
    hf_logging.disable_progress_bar()
    model: Any = SpecModel.from_pretrained(
        options.source, base=options.base, dtype="auto", allow_pickle=options.allow_pickle,
        allow_nonfinite=options.allow_nonfinite,
    )  # fmt: skip
    if options.dtype is not None:
        model.head.to(as_dtype(options.dtype))
    model.save_pretrained(options.out)
    record = {
        "written": str(options.out), "kind": model.head.config.kind, "base": model.config.base_model_name_or_path,
        "parameters": sum(p.numel() for p in model.head.parameters()),
        "dtype": str(model.head.dtype).removeprefix("torch."), "tapped_layers": list(model.head.layers),
    }  # fmt: skip
    output(record, show, options.as_json)


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is unknown; expected {', '.join(DTYPES)}")


def show(record: dict[str, Any]) -> None:
    """Print the record on stdout, one line per value."""
    width = max(map(len, record))
    for name, value in record.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        print_hanging(f"{name.replace('_', ' '):<{width}}  {text}", width + 2)
