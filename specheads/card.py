"""The model card of a head, written from what its training run left behind: figures, recipe, curves."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specheads.curves import FILE as CURVES
from specheads.formats.exporting import engines_for
from specheads.formats.readme import accepted_length, history, results
from specheads.hub import may_be_repository
from specheads.recipe import RECIPE, parse_yaml

if TYPE_CHECKING:
    from specheads.spec_model import SpecModel

_TITLES = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "medusa": "Medusa", "hydra": "Hydra"}
_SHOWN = 8  # evaluations listed at most


def card(model: SpecModel, run: Any = None, *, repo_id: str = "HEAD", license: str | None = None) -> str:
    """Markdown with the hub's metadata in front. run: the folder of the run (default: where the head was loaded from);
    what is not there is left out. license: of the head, a name the hub knows."""
    folder = Path(str(run or model.config.name_or_path or ""))
    known = folder if str(folder) != "." and folder.is_dir() else None
    kind, named = model.head.config.kind, model.config.base_model_name_or_path or "its base model"
    base = _public(named)
    metadata: dict[str, Any] = {"library_name": "specheads", "tags": ["speculative-decoding", "draft-head", kind]}
    given = ', base="path/to/the/base"'  # which is not said where it is not on the hub
    if _on_the_hub(named):
        metadata["base_model"], given = base, ""
    if license is not None:
        metadata["license"] = license
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {_TITLES.get(kind, kind)} draft head for {base}",
        f"It drafts tokens that {base} then verifies: the same text, or under sampling the same law, in fewer passes.",
        f'```python\nimport specheads\n\nmodel = specheads.SpecModel.from_pretrained("{repo_id}"{given})\n'
        "model.generate(**inputs, max_new_tokens=100)\n```",
        *(_measured(known) if known else []),
        *(_recipe(known) if known else []),
        _serving(model, repo_id),
    ]
    return "\n\n".join(parts) + "\n"


def write(model: SpecModel, folder: Path, run: Any = None, *, repo_id: str, license: str | None = None) -> None:
    """README.md in `folder`, and the picture that it shows."""
    (folder / "README.md").write_text(card(model, run, repo_id=repo_id, license=license), "utf8")
    picture = Path(str(run or model.config.name_or_path or "")) / CURVES
    if picture.is_file():
        shutil.copyfile(picture, folder / CURVES)


def _measured(run: Path) -> list[str]:
    """Accepted length, accuracy by depth, and how they came about."""
    last, parts = results(run), []
    if (length := accepted_length(run)) is not None:
        parts.append(f"Accepted length of a greedy chain on held-out rows, bonus token included: **{length:.2f}**.")
    if (measured := last.get("parity_measured")) is not None:
        parts.append(f"The same in real decoding at the end of the run: {measured:.2f}.")
    if (served := last.get("parity_served")) is not None:
        parts.append(f"With the tree that it drafts by default: {served:.2f}.")
    depths: list[str] = []
    while (share := last.get(f"eval_accuracy_depth_{len(depths) + 1}")) is not None:
        behind = last.get(f"eval_conditional_accuracy_depth_{len(depths) + 1}")
        depths.append(f"| {len(depths) + 1} | {share:.3f} | {'' if behind is None else f'{behind:.3f}'} |")
    if depths:
        head = "| depth | first choice is the base's | of those with every depth before right |\n|---:|---:|---:|"
        parts.append("\n".join([head, *depths]))
    evaluated = [log for log in history(run) if "eval_accepted_length" in log and "step" in log]
    if len(evaluated) > 1:
        kept = sorted({round(i * (len(evaluated) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)})
        shown = [
            (log["step"], log["eval_accepted_length"], log.get("eval_loss")) for log in map(evaluated.__getitem__, kept)
        ]
        rows = [f"| {step} | {length:.2f} | {'' if loss is None else f'{loss:.4g}'} |" for step, length, loss in shown]
        parts.append("\n".join(["| step | accepted length | loss |\n|---:|---:|---:|", *rows]))
    if (run / CURVES).is_file():
        parts.append(f"![loss, accepted length and accuracy over the steps]({CURVES})")
    return [f"## Measured\n\n{parts[0]}", *parts[1:]] if parts else []


def _recipe(run: Path) -> list[str]:
    """Data and options of the run; of files their names alone."""
    if not (run / RECIPE).is_file():
        return []
    recipe = parse_yaml((run / RECIPE).read_text("utf8"), RECIPE)
    recipe = _without_paths({name: value for name, value in recipe.items() if name != "launch"})
    recipe.get("training", {}).pop("output_dir", None)
    return [f"## Trained\n\n```yaml\n{yaml.safe_dump(recipe, sort_keys=False).rstrip()}\n```"]


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_paths(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return _public(value) if isinstance(value, str) and "/" in value else value


def _on_the_hub(name: str) -> bool:
    return may_be_repository(name) and not Path(name).exists()


def _public(name: str) -> str:
    """A name of the hub, else the last part of a path: one of this machine says nothing elsewhere."""
    return name if _on_the_hub(name) else Path(name).name


def _serving(model: SpecModel, repo_id: str) -> str:
    engines = engines_for(model)
    if not engines:
        return "## Served\n\nBy specheads; no other program reads a head of this form."
    lines = [f"specheads export {repo_id} served --to {engine}" for engine in engines]
    return (
        "## Served\n\nEach writes a README with the command of that server.\n\n```bash\n" + "\n".join(lines) + "\n```"
    )
