"""The model card of a head, written from the files of its training run: metrics, recipe, curves."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import PreTrainedModel

from specheads.decoding.results import RANGES, range_name
from specheads.heads import DraftHead
from specheads.hub import may_be_repository
from specheads.models.config import SpecConfig
from specheads.models.files import CURVES, RECIPE, history, numbers, results, run_of
from specheads.models.formats.export.exporting import engines_for
from specheads.options import read_yaml
from specheads.version import __version__

_SHOWN = 8  # at most so many evaluations are listed
_PROMPT = "The first thing to know is"


@dataclass(frozen=True)
class TrainingRecord:
    """A training run: its final metrics, its log, its recipe as YAML, further paragraphs on how the head was trained,
    whether there is a plot of its curves, and the step whose head was restored at the end, if any."""

    results: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    recipe: str | None = None
    trained: Sequence[str] = ()
    curves: bool = False
    restored_step: int | None = None

    @classmethod
    def of_folder(cls, run: Path) -> TrainingRecord:
        """The record of the run in a folder."""
        recipe = (run / RECIPE).read_text("utf8") if (run / RECIPE).is_file() else None
        metrics, logs = numbers(results(run)), [numbers(log) for log in history(run)]
        return cls(metrics, logs, recipe, curves=(run / CURVES).is_file(), restored_step=metrics.get("head_step"))


def card(
    config: SpecConfig, base: PreTrainedModel, head: DraftHead, run: Any = None, *, repo_id: str = "HEAD",
    license: str | None = None,
) -> str:  # fmt: skip
    """Markdown that begins with the hub's metadata. run: the folder of the run (default: where the head was loaded
    from, unless it has changed since); what is missing there is left out. license: the head's, a name known to the hub.
    """
    folder = run or run_of(config.name_or_path, head)
    known = TrainingRecord.of_folder(Path(folder)) if folder and Path(folder).is_dir() else TrainingRecord()
    argument = (
        "" if on_the_hub(_named(config)) else ', base="path/to/the/base"'
    )  # a base that is not on the hub is not named
    return text(config, head, known, f'"{repo_id}"{argument}', _serving(config, base, head, repo_id), license)


def text(
    config: SpecConfig, head: DraftHead, run: TrainingRecord, source: str, served: str,
    license: str | None = None,
) -> str:  # fmt: skip
    """The card. source: the from_pretrained() arguments that load the head; served: the section on other servers."""
    kind, named = head.config.kind, _named(config)
    base = _public(named)
    metadata: dict[str, Any] = {
        "library_name": "specheads", "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", kind],
    }  # fmt: skip
    if on_the_hub(named):
        metadata["base_model"] = base
    if license is not None:
        metadata["license"] = license
    metadata["widget"] = [{"text": _PROMPT}]
    title, figures = f"{head.config.title or kind} draft head for {base}", _figures(run)
    if index := _model_index(title, figures):
        metadata["model-index"] = index
    parameters = sum(p.numel() for p in head.parameters())
    licensed = base_license(named)
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {title}",
        f"It drafts tokens that {base} then verifies: the same text, or under sampling the same distribution, in fewer "
        f"passes. {parameters / 1e6:.2f}M parameters."
        + (f" Licence of {base}: {licensed}; the head is of no use without it." if licensed else ""),
        "```python\nimport specheads\nfrom transformers import AutoTokenizer\n\n"
        f"model = specheads.SpecModel.from_pretrained({source})\n"
        "tokenizer = AutoTokenizer.from_pretrained(model.base.name_or_path)\n"
        f'inputs = tokenizer("{_PROMPT}", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))\n```",
        *_measured(run, figures),
        *_trained(config, run),
        served,
        f"Made with specheads {__version__}, torch {torch.__version__} and transformers {transformers.__version__}.",
    ]
    return "\n\n".join(parts) + "\n"


def write(
    folder: Path, config: SpecConfig, base: PreTrainedModel, head: DraftHead, run: Any = None, *, repo_id: str,
    license: str | None = None,
) -> None:  # fmt: skip
    """Write README.md into `folder`, and the plot that it shows."""
    source = run or run_of(config.name_or_path, head)
    (folder / "README.md").write_text(card(config, base, head, source, repo_id=repo_id, license=license), "utf8")
    if source and (picture := Path(source) / CURVES).is_file():
        shutil.copyfile(picture, folder / CURVES)


def base_license(name: str) -> str | None:
    """The licence that the card in the base's folder names; None if there is none."""
    path = Path(name) / "README.md"
    front = path.read_text("utf8", errors="replace").split("---", 2) if path.is_file() else []
    try:
        metadata = yaml.safe_load(front[1]) if len(front) == 3 and not front[0].strip() else None
    except yaml.YAMLError:
        return None
    licence = metadata.get("license") if isinstance(metadata, dict) else None
    return licence if isinstance(licence, str) and licence else None


def _named(config: SpecConfig) -> str:
    return config.base_model_name_or_path or "its base model"


def _figures(run: TrainingRecord) -> dict[str, Any]:
    """The last value of each metric, up to the restored step, and the final ones."""
    last: dict[str, Any] = {}
    for log in run.history:
        if run.restored_step is None or log.get("step", 0) <= run.restored_step:
            last |= {name: value for name, value in log.items() if name.startswith("eval_")}
    return {**last, **run.results}


def _model_index(title: str, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures as the hub shows them beside a card, a result for each held-out set; [] if there are none."""
    results = []
    for name, prefix in _held_out_sets(figures).items():
        metrics = [(figures[f"{prefix}accepted_length"], "accepted_length", "accepted length of a greedy chain")]
        if (first := figures.get(f"{prefix}accuracy_depth_1")) is not None:
            metrics.append((first, "accuracy", "accuracy at depth 1"))
        results.append({
            "task": {"type": "text-generation"},
            "dataset": {"type": "held-out", "name": f"held-out rows{f' ({name})' if name else ''}"},
            "metrics": [{"type": type_, "value": round(value, 4), "name": label} for value, type_, label in metrics],
        })  # fmt: skip
    return [{"name": title, "results": results}] if results else []


def _measured(run: TrainingRecord, last: Mapping[str, Any]) -> list[str]:
    """The section on accepted length and accuracy by depth, final and over the run. last: see `_figures`."""
    sets = _held_out_sets(last)
    parts = [
        f"Accepted length of a greedy chain on held-out rows{f' ({name})' if name else ''}, bonus token included: "
        f"**{last[f'{prefix}accepted_length']:.2f}**."
        for name, prefix in sets.items()
    ]
    if (measured := last.get("parity_measured")) is not None:
        parts.append(f"The same in real decoding at the end of the run: {measured:.2f}.")
    if (served := last.get("parity_served")) is not None:
        parts.append(f"With the tree that it drafts by default: {served:.2f}.")
    parts += [_depth_table(last, name, prefix) for name, prefix in sets.items()]
    parts += [_range_table(last, name, prefix) for name, prefix in sets.items()]
    steps = [log["step"] for log in run.history if "step" in log]
    if run.restored_step is not None and parts and max(steps, default=0) > run.restored_step:
        parts.append(f"The head is that of step {run.restored_step} of {max(steps)}, the best of the run.")
    parts += [_step_table(run.history, name, prefix) for name, prefix in sets.items()]
    if run.curves:
        parts.append(f"![loss, accepted length and accuracy over the steps]({CURVES})")
    parts = [part for part in parts if part]
    return [f"## Measured\n\n{parts[0]}", *parts[1:]] if parts else []


def _held_out_sets(figures: Mapping[str, Any]) -> dict[str, str]:
    """Held-out set → the prefix of its metrics, `eval_NAME_`; the name of a single set may be ""."""
    matches = (re.fullmatch(r"(eval_(?:(.+)_)?)accepted_length", figure) for figure in figures)
    return {match[2] or "": match[1] for match in matches if match}


def _depth_table(figures: Mapping[str, Any], name: str, prefix: str) -> str:
    """The accuracy at each depth on one held-out set; "" where it was not measured."""
    rows: list[str] = []
    while (share := figures.get(f"{prefix}accuracy_depth_{len(rows) + 1}")) is not None:
        conditional = figures.get(f"{prefix}conditional_accuracy_depth_{len(rows) + 1}")
        rows.append(f"| {len(rows) + 1} | {share:.3f} | {'' if conditional is None else f'{conditional:.3f}'} |")
    depth = f"depth, {name}" if name else "depth"
    head = f"| {depth} | first choice is the base's | of those with every depth before right |\n|---:|---:|---:|"
    return "\n".join([head, *rows]) if rows else ""


def _range_table(figures: Mapping[str, Any], name: str, prefix: str) -> str:
    """The accepted length by output position on one held-out set; "" where its answers reach a single range."""
    found = ((start, figures.get(f"{prefix}accepted_length_from_{start}")) for start in RANGES)
    rows = [f"| {range_name(start)} | {length:.2f} |" for start, length in found if length is not None]
    title = f"output position, {name}" if name else "output position"
    return "\n".join([f"| {title} | accepted length |\n|---:|---:|", *rows]) if rows else ""


def _step_table(history: Sequence[Mapping[str, Any]], name: str, prefix: str) -> str:
    """One held-out set's metrics over the run; "" for fewer than two evaluations."""
    evaluated = [log for log in history if f"{prefix}accepted_length" in log and "step" in log]
    if len(evaluated) < 2:
        return ""
    kept = sorted({round(i * (len(evaluated) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)})
    shown = [
        (log["step"], log[f"{prefix}accepted_length"], log.get(f"{prefix}loss"))
        for log in map(evaluated.__getitem__, kept)
    ]
    rows = [f"| {step} | {length:.2f} | {'' if loss is None else f'{loss:.4g}'} |" for step, length, loss in shown]
    step = f"step, {name}" if name else "step"
    return "\n".join([f"| {step} | accepted length | loss |\n|---:|---:|---:|", *rows])


def _trained(config: SpecConfig, run: TrainingRecord) -> list[str]:
    """The section on data and options of the run; paths are cut to their last part."""
    parts = list(run.trained)
    if (longest := config.trained_length) is not None:
        parts.append(f"The longest text it was trained on has {longest} tokens.")
    if run.recipe is not None:
        recipe = read_yaml(run.recipe, RECIPE)
        recipe = _without_paths({name: value for name, value in recipe.items() if name != "launch"})
        (recipe.get("training") or {}).pop("output_dir", None)
        parts.append(f"```yaml\n{yaml.safe_dump(recipe, sort_keys=False).rstrip()}\n```")
    return [f"## Trained\n\n{parts[0]}", *parts[1:]] if parts else []


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_paths(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return _public(value) if isinstance(value, str) and "/" in value else value


def on_the_hub(name: str) -> bool:
    return may_be_repository(name) and not Path(name).exists()


def _public(name: str) -> str:
    """A hub id unchanged; of a path only the last part, since the rest means nothing on another machine."""
    return name if on_the_hub(name) else Path(name).name


def _serving(config: SpecConfig, base: PreTrainedModel, head: DraftHead, repo_id: str) -> str:
    engines = engines_for(config, base, head)
    if not engines:
        return "## Served\n\nBy specheads; no other program reads a head of this form."
    lines = [f"specheads export {repo_id} served --to {engine}" for engine in engines]
    return (
        "## Served\n\nEach writes a README with the command of that server.\n\n```bash\n" + "\n".join(lines) + "\n```"
    )
