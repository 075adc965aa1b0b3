"""One HTML file of training runs, benches, sweeps, step costs and printed records: charts, tables, command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from specheads import pictures
from specheads.bench import environment
from specheads.bench.compare import report
from specheads.bench.compare.decoder_spec import by_cell
from specheads.bench.compare.plots import pictures_of, time_splits, tree_heat
from specheads.bench.web import printed
from specheads.bench.web.parts import STYLE, code, heat, table
from specheads.decoding.planner.by_cost import CostTable
from specheads.files import write_whole
from specheads.models.files import RECIPE, RESULTS, STATE, history, numbers, results
from specheads.training.report import compare, curves
from specheads.training.report.curves import series
from specheads.version import __version__

BENCH = f"{report.NAME}.json"
_MAX_BYTES = 256 << 20  # of a bench's record, which holds every step


def write(path: Path, runs: Sequence[Path]) -> None:
    """Write the page of these runs. ValueError or OSError, in one line, for what is no run; nothing is written then."""
    sections = [f"<h2>{escape(run.as_posix())}</h2>{''.join(section(run))}" for run in runs]
    title = "specheads: " + ", ".join(run.name for run in runs)
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
    )
    body = (
        f"<body><h1>{escape(title)}</h1>{''.join(sections)}<p class=note>Written by specheads {__version__}.</p></body>"
    )
    write_whole(path, f"{head}\n{body}</html>\n")


def section(run: Path) -> Iterator[str]:
    """The parts of the page for one run: a training run's folder, one of `specheads bench --out`, a JSON file of
    `specheads bench` or `specheads tune`, or what `audit`, `adapt` or `generate` printed with `--json`."""
    if run.is_dir() and (run / BENCH).is_file():
        return bench(_json(run / BENCH), run / BENCH)
    if run.is_dir() and any((run / name).is_file() for name in (STATE, RESULTS)):
        return training(run)
    if run.is_file() and run.suffix == ".json":
        record = _json(run)
        if (of_kind := printed.section(record, run)) is not None:
            return of_kind
        return bench(record, run) if "rows" in record else costs(run)
    if not run.exists():
        raise FileNotFoundError(f"no such run: {run}")
    raise ValueError(
        f"{run}: expected a folder of `specheads train` ({STATE} or {RESULTS}) or of `specheads bench --out` "
        f"({BENCH}), a file of `specheads tune`, or what `audit`, `adapt` or `generate` printed with --json"
    )


def draw_all(runs: Sequence[Path], folder: Path) -> list[Path]:
    """Write the pictures of these runs, each in all forms; several training runs beside one another, too."""
    drawn: dict[str, pictures.Draw] = {}
    compared = []
    for name, run in zip(compare.distinct_names([str(run) for run in runs]), runs, strict=True):
        if run.is_dir() and not (run / BENCH).is_file():
            steps = [entry for entry in map(numbers, history(run)) if "step" in entry]
            found: dict[str, pictures.Draw] = {"curves": partial(curves.figure, steps)} if series(steps) else {}
            compared += [compare.read_curve(run)] if any("tokens_seen" in entry for entry in steps) else []
        else:
            record = _json(run / BENCH if run.is_dir() else run)
            if printed.section(record, run) is not None:
                continue
            batches = {} if "rows" in record else _parts(CostTable.load(run))
            found = {f"batch_{batch}": _costs(parts) for batch, parts in batches.items()} or pictures_of(record)
        prefix = f"{name.replace('/', '-')}-" if len(runs) > 1 else ""
        drawn |= {prefix + picture: draw for picture, draw in found.items()}
    if len(compared) > 1:
        drawn["compared"] = partial(compare.figure, compared)
    return pictures.save_all(folder, drawn)


def training(run: Path) -> Iterator[str]:
    """Curves over the steps, accuracy by depth at each evaluation, final figures, the recipe."""
    log = [numbers(entry) for entry in history(run)]
    steps = [entry for entry in log if "step" in entry]
    if series(steps):
        yield pictures.inline_svg(partial(curves.figure, steps, across=1))
    final = numbers(results(run))
    for name, prefix in _held_out_sets([*log, final]).items():
        shares = {
            f"step {entry['step']:,g}" if "step" in entry else "at the end": _by_depth(entry, prefix)
            for entry in [*_spaced([e for e in log if f"{prefix}accuracy_depth_1" in e], 8), final]
        }
        if shades := heat({step: row for step, row in shares.items() if row}, "depth"):
            yield f"<h3>first choices that are the base's own, by depth{escape(f', {name}' if name else '')}</h3>"
            yield shades
    if final:
        yield "<h3>at the end</h3>" + table(("figure", "value"), [[k, f"{v:,.5g}"] for k, v in final.items()])
    if (run / RECIPE).is_file():
        yield f"<h3>command</h3>{code(f'specheads train {run.as_posix()}/{RECIPE}')}"
        yield f"<h3>configuration</h3>{code((run / RECIPE).read_text('utf8'))}"


def bench(record: dict[str, Any], path: Path) -> Iterator[str]:
    """A chart of speeds for each cell and of what was accepted by depth and position; all tables; how it was run."""
    try:
        if any(row["speed_up"] is not None for row in record["rows"]):
            for draw in pictures_of(record, across=1).values():
                yield pictures.inline_svg(draw)
        for cell, rows in by_cell(record["rows"]).items():
            by_depth = {row["decoder"]: row["accepted_by_depth"] or () for row in rows}
            if shades := heat({name: shares for name, shares in by_depth.items() if any(shares)}, "depth"):
                yield f"<h3>{escape(str(cell))}: steps that accepted a draft this deep</h3>{shades}"
            positions = {
                row["decoder"]: sorted((float(start), mean) for start, mean in by_start.items())
                for row in rows
                if any(row["accepted_by_depth"] or ()) and (by_start := row["accepted_by_position"])
            }
            for row in rows:
                nodes = row.get("accepted_nodes") or {}
                if any(set(path) - {"0", "."} for path in nodes):  # a chain has no more to show than the table
                    title = f"{cell}: {row['decoder']}: steps that accepted each node of its tree"
                    yield f"<h3>{escape(title)}</h3>"
                    yield pictures.inline_svg(partial(tree_heat, nodes))
            if any(row["shares"] for row in rows):
                yield f"<h3>{escape(str(cell))}: where the time goes</h3>"
                yield pictures.inline_svg(partial(time_splits, rows))
            if len({x for points in positions.values() for x, _ in points}) > 1:
                yield f"<h3>{escape(str(cell))}: accepted length by output position</h3>"
                where = "output position at which the step began"
                yield pictures.inline_svg(partial(pictures.line_chart, positions, where, "tokens a step"))
        for shown in report.tables(record["rows"]):
            yield f"<h3>{escape(shown.title)}</h3>{table(shown.columns, shown.lines)}"
        yield "".join(f'<p class="note">{escape(line)}</p>' for line in report.notes(record))
        yield f"<h3>command</h3>{code(record['command'])}"
        peers = "".join(f", {name} {version}" for name, version in record["peers"].items())
        where = f"{environment.line(record['environment'])}{peers}; {record['dtype']}."
        yield f"<h3>environment</h3><p>{escape(where)}</p>"
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no record of this version's `specheads bench` ({error!r}); run it again"
        ) from error


def costs(path: Path) -> Iterator[str]:
    """Milliseconds of a step by batch: verification over nodes, and the rest."""
    known = CostTable.load(path)
    for batch, parts in _parts(known).items():
        yield f"<h3>batch {batch}</h3>{pictures.inline_svg(_costs(parts))}"
        columns = ("part", *(f"{nodes:g} nodes" for nodes, _ in parts["rest of the loop"]))
        yield table(columns, [[name, *(f"{ms:.2f}" for _, ms in points)] for name, points in parts.items()])
    if known.acceptance:
        depths = {f"depth {i + 1}": shares for i, shares in enumerate(known.acceptance)}
        yield f"<h3>drafts that were right, by depth and rank</h3>{heat(depths, 'rank')}"
    yield f'<p class="note">{escape(known.title)}; measured with {escape(known.measured_with)}.</p>'
    if known.key is not None:
        yield f"<h3>environment</h3><p>{escape(f'{known.key.device}, {known.key.dtype}')}"
        yield f"{', compiled' if known.key.compiled else ''}.</p>"


def _parts(table: CostTable) -> dict[int, dict[str, Sequence[tuple[float, float]]]]:
    """Batch → part of a step → (nodes, milliseconds)."""
    batches: dict[int, dict[str, Sequence[tuple[float, float]]]] = {}
    for batch, step in sorted(table.batches.items()):
        verify = {f"verify after {length:,} tokens": curve for length, curve in sorted(step.verify.items())}
        parts = {**verify, "rest of the loop": step.loop, "each further level of the draft": step.level}
        batches[batch] = {name: curve.points for name, curve in parts.items() if curve is not None}
    return batches


def _costs(parts: Mapping[str, Sequence[tuple[float, float]]]) -> pictures.Draw:
    return partial(pictures.line_chart, parts, "nodes of a row", "milliseconds")


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES >> 20} MiB, as no record has")
    try:
        record = json.loads(path.read_text("utf8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); was its command stopped?") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds a {type(record).__name__}; expected the record of a bench or of tune")
    return record


def _held_out_sets(entries: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Held-out set → the prefix of its figures."""
    found = (re.fullmatch(r"(eval_(?:(.+)_)?)accuracy_depth_1", name) for entry in entries for name in entry)
    sets = {match[2] or "": match[1] for match in found if match}
    return {name: prefix for name, prefix in sets.items() if not name.endswith("conditional")}


def _by_depth(entry: dict[str, Any], prefix: str) -> list[float]:
    shares: list[float] = []
    while (share := entry.get(f"{prefix}accuracy_depth_{len(shares) + 1}")) is not None:
        shares.append(share)
    return shares


def _spaced(entries: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    kept = sorted({round(i * (len(entries) - 1) / (most - 1)) for i in range(most)}) if entries else []
    return [entries[i] for i in kept]
