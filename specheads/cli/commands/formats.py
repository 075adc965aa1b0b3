"""`specheads export` and `import`: heads to and from the formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import logging as hf_logging

from specheads.models import export_checks
from specheads.models.base.loading import DTYPES, as_dtype
from specheads.models.files import refuse_nonempty
from specheads.models.formats import ENGINES
from specheads.models.formats.export.exporting import form_for
from specheads.models.spec_model import SpecModel
from specheads.options import refuse_unknown


def export(
    source: str, out: Path, to: str, *, base: str | None, dtype: str | None, embeddings: bool, gguf: Path | None,
    check: bool,
) -> dict[str, Any]:  # fmt: skip
    """Export a head → the export's path, its format and, if checked, the check's result."""
    refuse_unknown([to], ENGINES, what="format for --to")
    _check_dtype(dtype)
    hf_logging.disable_progress_bar()
    model: Any = SpecModel.from_pretrained(source, base=base, dtype="auto")
    folder = model.export(out, to, dtype=dtype, embeddings=embeddings, gguf=gguf)
    form = form_for(model.config, model.base, model.head, to)
    record = {
        "written": str(folder), "form": form.title, "written_for": form.versions,
        "files": sorted(path.name for path in folder.iterdir()), "read_next": str(folder / "README.md"),
    }  # fmt: skip
    return {**record, "check": export_checks.check(folder, model)} if check else record


def import_head(
    source: str, out: Path, *, base: str | None, allow_pickle: bool, allow_nonfinite: bool, dtype: str | None
) -> dict[str, Any]:
    """Import a head → what was read, and where it was saved. `out` must be empty: an older run's figures in it would
    pass for this head's."""
    _check_dtype(dtype)
    refuse_nonempty(out, "import into")
    hf_logging.disable_progress_bar()
    model: Any = SpecModel.from_pretrained(
        source, base=base, dtype="auto", allow_pickle=allow_pickle, allow_nonfinite=allow_nonfinite
    )
    if dtype is not None:
        model.head.to(as_dtype(dtype))
    model.save_pretrained(out)
    return {
        "written": str(out), "kind": model.head.config.kind, "base": model.config.base_model_name_or_path,
        "parameters": sum(p.numel() for p in model.head.parameters()),
        "dtype": str(model.head.dtype).removeprefix("torch."), "tapped_layers": list(model.head.layers),
    }  # fmt: skip


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is unknown; expected {', '.join(DTYPES)}")


def show(record: dict[str, Any]) -> None:
    """Print the record on stdout, one line per value."""
    width = max(map(len, record))
    for name, value in record.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name.replace('_', ' '):<{width}}  {text}")
