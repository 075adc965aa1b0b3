"""One HTML file of training runs, benches, sweeps and step costs: charts, tables, configuration, command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from specheads.bench import environment
from specheads.bench.compare import report
from specheads.bench.compare.decoder_spec import by_cell
from specheads.bench.web import charts
from specheads.decoding.planner.by_cost import CostTable
from specheads.files import write_whole
from specheads.models.files import RECIPE, RESULTS, STATE, history, numbers, results
from specheads.training.report.curves import series
from specheads.version import __version__

BENCH = f"{report.NAME}.json"
_MAX_BYTES = 256 << 20  # of a bench's record, which holds every step
_STYLE = """
:root{color-scheme:light dark;--ink:#1d2328;--soft:#5c6770;--page:#fff;--rule:#dde2e6;--c0:#0072b2;--c1:#d55e00;
--c2:#009e73;--c3:#cc79a7;--c4:#9a7b00;--c5:#3a9bd9;--c6:#6b6b6b}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8eb;--soft:#a3adb5;--page:#15191c;--rule:#343b41;--c0:#56b4e9;
--c1:#e88a4a;--c2:#3fc79a;--c3:#e0a3c5;--c4:#e6c229;--c5:#8ecbf0;--c6:#b5b5b5}}
*{box-sizing:border-box}body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.5rem}h2{margin-top:2.5rem;border-top:1px solid var(--rule);
padding-top:1rem;overflow-wrap:anywhere}h3{margin-bottom:.3rem}p.note{color:var(--soft);margin:.2rem 0}
.wide,pre{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
pre{background:color-mix(in srgb,var(--rule) 45%,transparent);padding:.7rem;
font-size:.85rem}svg{width:100%;max-width:44rem;height:auto;display:block}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.grid{stroke:var(--rule)}.mark{stroke:var(--ink);stroke-dasharray:3 3}.range{stroke:var(--ink);stroke-width:2}
.line{fill:none;stroke-width:2}.legend span{margin-right:1rem;font-size:.85rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
.heat{background:color-mix(in srgb,var(--c0) calc(var(--share)*60%),transparent)}
""" + "".join(f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}.b{i}{{background:var(--c{i})}}" for i in range(7))


def write(path: Path, runs: Sequence[Path]) -> None:
    """Write the page of these runs. ValueError or OSError, in one line, for what is no run; nothing is written then."""
    sections = [f"<h2>{escape(run.as_posix())}</h2>{''.join(section(run))}" for run in runs]
    title = "specheads: " + ", ".join(run.name for run in runs)
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head>'
    )
    body = (
        f"<body><h1>{escape(title)}</h1>{''.join(sections)}<p class=note>Written by specheads {__version__}.</p></body>"
    )
    write_whole(path, f"{head}\n{body}</html>\n")


def section(run: Path) -> Iterator[str]:
    """The parts of the page for one run: a training run's folder, one of `specheads bench --out`, or a JSON file of
    `specheads bench` or `specheads tune`."""
    if run.is_dir() and (run / BENCH).is_file():
        return bench(_json(run / BENCH), run / BENCH)
    if run.is_dir() and any((run / name).is_file() for name in (STATE, RESULTS)):
        return training(run)
    if run.is_file() and run.suffix == ".json":
        return bench(record, run) if "rows" in (record := _json(run)) else costs(run)
    if not run.exists():
        raise FileNotFoundError(f"no such run: {run}")
    raise ValueError(
        f"{run}: expected a folder of `specheads train` ({STATE} or {RESULTS}) or of `specheads bench --out` "
        f"({BENCH}), or a file of `specheads tune`"
    )


def training(run: Path) -> Iterator[str]:
    """Curves over the steps, accuracy by depth at each evaluation, final figures, the recipe."""
    log = [numbers(entry) for entry in history(run)]
    for panel, curves in series([entry for entry in log if "step" in entry]).items():
        if chart := charts.lines(curves, "step"):
            yield f"<h3>{escape(panel)}</h3>{chart}"
    final = numbers(results(run))
    for name, prefix in _held_out_sets([*log, final]).items():
        shares = {
            f"step {entry['step']:,g}" if "step" in entry else "at the end": _by_depth(entry, prefix)
            for entry in [*_spaced([e for e in log if f"{prefix}accuracy_depth_1" in e], 8), final]
        }
        if table := charts.heat({step: row for step, row in shares.items() if row}, "depth"):
            yield f"<h3>first choices that are the base's own, by depth{escape(f', {name}' if name else '')}</h3>"
            yield table
    if final:
        yield "<h3>at the end</h3>" + _table(("figure", "value"), [[k, f"{v:,.5g}"] for k, v in final.items()])
    if (run / RECIPE).is_file():
        yield f"<h3>command</h3>{_code(f'specheads train {run.as_posix()}/{RECIPE}')}"
        yield f"<h3>configuration</h3>{_code((run / RECIPE).read_text('utf8'))}"


def bench(record: dict[str, Any], path: Path) -> Iterator[str]:
    """A chart of speeds for each cell and of what was accepted by depth and position; all tables; how it was run."""
    try:
        cells = by_cell(record["rows"])
        speeds = {
            cell: {row["decoder"]: (row["speed_up"], *_interval(row)) for row in rows if row["speed_up"] is not None}
            for cell, rows in cells.items()
        }
        most = max([1.0, *map(charts.largest, speeds.values())])
        for cell, rows in cells.items():
            if chart := charts.bars(speeds[cell], line=1.0, most=most):
                yield f"<h3>{escape(str(cell))}: speed over {escape(record['reference'])}</h3>{chart}"
            by_depth = {row["decoder"]: row["accepted_by_depth"] or () for row in rows}
            if heat := charts.heat({name: shares for name, shares in by_depth.items() if any(shares)}, "depth"):
                yield f"<h3>{escape(str(cell))}: steps that accepted a draft this deep</h3>{heat}"
            positions = {
                row["decoder"]: sorted((float(start), mean) for start, mean in by_start.items())
                for row in rows
                if any(row["accepted_by_depth"] or ()) and (by_start := row["accepted_by_position"])
            }
            if len({x for points in positions.values() for x, _ in points}) > 1:
                yield f"<h3>{escape(str(cell))}: accepted length by output position</h3>"
                yield charts.lines(positions, "output position at which the step began")
        for shown in report.tables(record["rows"]):
            yield f"<h3>{escape(shown.title)}</h3>{_table(shown.columns, shown.lines)}"
        yield "".join(f'<p class="note">{escape(line)}</p>' for line in report.notes(record))
        yield f"<h3>command</h3>{_code(record['command'])}"
        peers = "".join(f", {name} {version}" for name, version in record["peers"].items())
        where = f"{environment.line(record['environment'])}{peers}; {record['dtype']}."
        yield f"<h3>environment</h3><p>{escape(where)}</p>"
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no record of this version's `specheads bench` ({error!r}); run it again"
        ) from error


def costs(path: Path) -> Iterator[str]:
    """Milliseconds of a step by batch: verification over nodes, and the rest."""
    table = CostTable.load(path)
    for batch, step in sorted(table.batches.items()):
        curves = {f"verify after {length:,} tokens": curve.points for length, curve in sorted(step.verify.items())}
        rest = {"rest of the loop": step.loop, "each further level of the draft": step.level}
        curves |= {name: curve.points for name, curve in rest.items() if curve is not None}
        yield f"<h3>batch {batch}: milliseconds over the nodes of a row</h3>{charts.lines(curves, 'nodes')}"
        columns = ("part", *(f"{nodes:g} nodes" for nodes, _ in step.loop.points))
        yield _table(columns, [[name, *(f"{ms:.2f}" for _, ms in points)] for name, points in curves.items()])
    if table.acceptance:
        depths = {f"depth {i + 1}": shares for i, shares in enumerate(table.acceptance)}
        yield f"<h3>drafts that were right, by depth and rank</h3>{charts.heat(depths, 'rank')}"
    yield f'<p class="note">{escape(table.title)}; measured with {escape(table.measured_with)}.</p>'
    if table.key is not None:
        yield f"<h3>environment</h3><p>{escape(f'{table.key.device}, {table.key.dtype}')}"
        yield f"{', compiled' if table.key.compiled else ''}.</p>"


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


def _interval(row: dict[str, Any]) -> tuple[float | None, float | None]:
    low, high = (None if row["reference"] else row["speed_up_interval"]) or (None, None)
    return low, high


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


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
