"""`specheads bench`: loads the models, measures what is not done yet, and shows the tables and the files' paths."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.bench import environment, shipped
from specheads.bench.compare import report
from specheads.bench.compare.decoder_spec import BenchSetup, DecoderSpec, Engine
from specheads.bench.compare.decoder_texts import Ours, load_engine, refuse_unknown_drafters
from specheads.bench.compare.judge import costs_of
from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.peer import Peer
from specheads.bench.compare.prompt_sets import prompt_sets
from specheads.bench.compare.run import decoders_of
from specheads.bench.compare.run import run as run_rounds
from specheads.bench.figures.floor import measure_floor
from specheads.cli.app import output
from specheads.cli.errors import refuse_file, refuse_folder
from specheads.cli.hanging import print_hanging
from specheads.cli.options.measure import BenchCommand
from specheads.decoding.drafters import Cascade
from specheads.models.named import Models
from specheads.pictures import require_matplotlib


def run(options: BenchCommand) -> int:
    """The exit code is 130, as after Ctrl-C, if not all rounds are done."""
    refuse_file(options.out, "--out")
    if options.record is not None:
        refuse_folder(options.record, "--record")
    record = bench(options, shlex.join(["specheads", *sys.argv[1:]]))
    output(record, show, options.as_json)
    return 0 if record["complete"] else 130


def bench(options: BenchOptions, command: str = "") -> dict[str, Any]:
    """Measure and write the files → the record of bench.json, with the files written. Progress goes to stderr."""
    if options.plots and options.record is None:
        require_matplotlib(", or leave them out with --no-plots")  # before hours of measuring, not after them
    engines = load_engines(options.engine)
    folder = heads_folder(options.model)
    refuse_unknown_drafters([*options.decoder, options.reference], shipped.names_in(folder))  # before a model loads
    hf_logging.disable_progress_bar()
    model = f"{folder}/base" if folder is not None else str(options.model)
    models = Models.load(
        model, base=options.base, dtype=options.dtype, device=options.device, quantize=options.quantize
    )
    specs = decoders_of(options, default_decoders(models, folder, [engine for engine, _ in engines.values()]))
    peers = {
        # -I: adds neither this environment's paths nor the worker's own folder, whose files would shadow packages.
        name: Peer(name, [str(python), "-I", str(engine.worker)], (options.out / "peers" / name).resolve())
        for name, (engine, python) in engines.items()
    }
    fewest, most = options.limits
    judged = any(spec.lossy for spec in specs.values()) or bool(options.task)
    setup = BenchSetup(models, folder, most, 0, peers, neutral=judged)
    costs = cascade_costs(options.cost, setup, specs)
    held_out = shipped.held_out_names(Path(str(models.target.name_or_path)))
    sets = prompt_sets(options, models.tokenizer, held_out)
    setup.longest = max(prompt_set.longest(most) for prompt_set in sets)
    where, floor = environment.environment(), measure_floor(models.target)
    try:
        versions = {name: version for peer in peers.values() for name, version in peer.ask("versions").items()}
        with terminal.progress(terminal.make_console(stderr=True), "measuring") as tell:
            outcome = run_rounds(options, setup, specs, sets, tell)
    finally:
        for peer in peers.values():
            peer.close()
    rows = report.rows_of(
        outcome.rounds, options.reference, floor.seconds, costs=costs, replayed=options.record is not None
    )
    record = {
        "command": command, "environment": where, "peers": versions, **options.to_dict(),
        "dtype": str(models.target.dtype).removeprefix("torch."), "max_new_tokens": most, "lowest_limit": fewest,
        "floor": floor.to_dict(), "costs": costs, "complete": outcome.complete,
        "prompt_sets": {
            prompt_set.name: {"prompts": len(prompt_set.ids), "note": prompt_set.note} for prompt_set in sets
        },
        "engines": {name: spec.peer or spec.engine for name, spec in specs.items()},
        "left_out": outcome.left_out, "rows": rows, "rounds": outcome.rounds,
    }  # fmt: skip
    files = report.write(options.out, record, plots=options.plots and options.record is None)
    return {**record, "files": [str(path) for path in files]}


def heads_folder(model: str | None) -> Path | None:
    """The folder of heads that can be given by name: MODEL if it holds base/, the shipped one if no model is given."""
    if model is None:
        return shipped.find_base(None).parent
    return Path(model) if (Path(model) / "base" / "config.json").is_file() else None


def default_decoders(models: Models, folder: Path | None, engines: Sequence[Engine]) -> tuple[str, ...]:
    """The usual alternatives, our plain loop, our prompt lookup, and each available head, also with draft="auto"."""
    heads = ["head"] if "head" in models.drafters else []
    if not heads and folder is not None:
        heads = [name for name in shipped.LABELS if (folder / name / "config.json").is_file()]
    others = ["transformers", "transformers-static", "transformers-lookup"]
    others += [name for engine in engines for name in engine.decoders]
    return (*others, "plain", "lookup", *heads, *(f"{head} auto" for head in heads))


def load_engines(texts: Collection[str]) -> dict[str, tuple[Engine, Path]]:
    """Name → engine and Python of each FILE=PYTHON. ValueError for another text, OSError for a missing file."""
    engines = {}
    for text in texts:
        file, equals, python = text.partition("=")
        if not equals or not python:
            raise ValueError(
                f"--engine {text!r} is not FILE=PYTHON, such as benchmarks/engines/llama.py=env/bin/python"
            )
        for path in (file, python):
            if not Path(path).is_file():
                raise FileNotFoundError(f"--engine {text}: there is no {path} (docs/bench.md)")
        engine = load_engine(Path(file))
        engines[engine.name] = engine, Path(python)
    return engines


def cascade_costs(cost: str, setup: BenchSetup, specs: Mapping[str, DecoderSpec]) -> dict[str, list[float]]:
    """By decoder, the costs of a pass of the base and of each draft of its cascade, where they are known."""
    loaded = {text: spec.load(setup) for text, spec in specs.items() if isinstance(spec, Ours) and spec.k_matrix}
    known = {
        text: costs_of(setup.models.target, drafter, cost)
        for text, drafter in loaded.items()
        if isinstance(drafter, Cascade)
    }
    return {text: costs for text, costs in known.items() if costs is not None}


def show(record: dict[str, Any]) -> None:
    """Print the tables, their notes and the files' paths on stdout."""
    tables = [*report.tables(record["rows"], wide=False)]
    out = terminal.make_console()
    for table in tables:
        out.print(table.title, soft_wrap=True)  # separately: in the table it would be wrapped at the table's width
        terminal.print_table(out, terminal.table("", table.columns, table.lines))
    print_hanging("More columns, and what was accepted by depth and position: bench.md.", 0)
    for line in (*report.legend(tables), *report.notes(record), environment.line(record["environment"])):
        print_hanging(line, 0)
    print_hanging("written: " + ", ".join(record["files"]), 0)
