"""`specheads export` and `import`: heads to and from the formats of other programs."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging as hf_logging

from specheads.cli.app import output
from specheads.cli.options.checkpoints import ExportOptions, ImportOptions
from specheads.models import export_checks
from specheads.models.base.loading import DTYPES, as_dtype
from specheads.models.files import refuse_nonempty
from specheads.models.formats import ENGINES
from specheads.models.formats.export.exporting import form_for
from specheads.models.spec_model import SpecModel
from specheads.options import refuse_unknown


def export(options: ExportOptions) -> None:
    """Print the export's path, its format and, if checked, the check's result."""
    refuse_unknown([options.to], ENGINES, what="format for --to")
    _check_dtype(options.dtype)
    hf_logging.disable_progress_bar()
    model: Any = SpecModel.from_pretrained(options.model, base=options.base, dtype="auto")
    folder = model.export(
        options.out, options.to, dtype=options.dtype, embeddings=options.embeddings, gguf=options.gguf
    )
    form = form_for(model.config, model.base, model.head, options.to)
    record = {
        "written": str(folder), "form": form.title, "written_for": form.versions,
        "files": sorted(path.name for path in folder.iterdir()), "read_next": str(folder / "README.md"),
    }  # fmt: skip
    if options.check:
        record["check"] = export_checks.check(folder, model)
    output(record, show, options.as_json)


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
        print(f"{name.replace('_', ' '):<{width}}  {text}")
