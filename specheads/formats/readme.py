"""The README of an export: what it is, the command that serves it, and what to expect of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.formats.files import read_table
from specheads.formats.format import Format

if TYPE_CHECKING:
    from specheads.spec_model import SpecModel

RESULTS, STATE = "results.json", "trainer_state.json"


def readme(form: Format, model: SpecModel, base: str, folder: str) -> str:
    """Markdown for the directory of an export."""
    import specheads

    config: Any = model.head.config
    # a parallel head drafts its whole block there, and the first draft_depth of it here
    depth = next(getattr(config, n) for n in ("num_heads", "num_drafted", "draft_depth") if hasattr(config, n))
    lines = [
        f"# {form.title}", "",
        f"A draft head of kind {config.kind} for `{base}`, exported by specheads {specheads.__version__}.", "",
        form.serve(base, folder, depth).rstrip(), "",
        f"Written for: {form.versions}. What was run and what was only read is in docs/compatibility.md of specheads.",
    ]  # fmt: skip
    if (length := accepted_length(model.config.name_or_path)) is not None:
        lines += [
            "", f"Expected accepted length of a chain, bonus token included: {length:.2f} on the held-out rows of its "
            "training. Much less means that the head was not loaded as it is: the text stays right without it.",
        ]  # fmt: skip
    else:
        lines += [
            "", "What it accepts was not recorded with it; `specheads evaluate` measures it. Compare: a head that a "
            "server loads wrongly still gives the right text, only slowly.",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def accepted_length(checkpoint: Any) -> float | None:
    """What its training measured on held-out rows, where the checkpoint's folder says so."""
    folder = Path(str(checkpoint or ""))
    if not checkpoint or not folder.is_dir():
        return None
    length = results(folder).get("eval_accepted_length")
    if isinstance(length, int | float):
        return float(length)
    lengths = [log.get("eval_accepted_length") for log in reversed(history(folder))]
    return next((float(length) for length in lengths if isinstance(length, int | float)), None)


def results(run: Path) -> dict[str, Any]:
    """The final metrics of a run; {} where its folder has none."""
    return _table(run / RESULTS)


def history(run: Path) -> list[dict[str, Any]]:
    """The log of a run, every step of it: some megabytes; [] where its folder has none."""
    return [log for log in _table(run / STATE).get("log_history") or () if isinstance(log, dict)]


def _table(path: Path) -> dict[str, Any]:
    return (read_table(path, most=None) or {}) if path.is_file() else {}
