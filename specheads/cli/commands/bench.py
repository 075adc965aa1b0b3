"""`specheads bench`: loads the models, measures what is not done yet, and shows the tables and the files' paths."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.bench import environment, shipped
from specheads.bench.compare import llama, openvino, prompt_sets, report
from specheads.bench.compare.cell import BenchSetup
from specheads.bench.compare.decoder_texts import parse_decoder, refuse_unknown_drafters
from specheads.bench.compare.peer import Peer
from specheads.bench.compare.run import BenchOptions, run
from specheads.bench.figures.floor import measure_floor
from specheads.bench.sweep.plots import require_matplotlib
from specheads.models.named import Models
from specheads.options import refuse_unknown

PEERS = {openvino.NAME: openvino.WORKER, llama.NAME: llama.WORKER}


def heads_folder(model: str | None, checkpoints: Path | None) -> Path | None:
    """The folder of heads that can be given by name: `checkpoints`, or the shipped one if no model is given."""
    return checkpoints if model is not None else shipped.find_base(checkpoints).parent


def load(model: str, base: str | None, dtype: str, device: str) -> Models:
    hf_logging.disable_progress_bar()
    return Models.load(model, base=base, dtype=dtype, device=device)


def default_decoders(models: Models, checkpoints: Path | None, peers: Mapping[str, Path]) -> tuple[str, ...]:
    """The usual alternatives, our plain loop, our prompt lookup, and each available head, also with draft="auto"."""
    heads = ["head"] if "head" in models.drafters else []
    if not heads and checkpoints is not None:
        heads = [name for name in shipped.LABELS if (checkpoints / name / "config.json").is_file()]
    theirs = ["transformers", "transformers-static", "transformers-lookup"]
    theirs += [text for name in PEERS if name in peers for text in (name, f"{name}-lookup")]
    return (*theirs, "plain", "lookup", *heads, *(f"{head} auto" for head in heads))


def parse_peers(given: list[str] | None) -> dict[str, Path]:
    """Name → Python of each --peer NAME=PYTHON. ValueError for an unknown name or a Python that does not exist."""
    found = {}
    for text in given or []:
        name, equals, python = text.partition("=")
        if not equals or not python:
            raise ValueError(f"--peer {text!r} is not NAME=PYTHON, such as openvino=ov/bin/python")
        refuse_unknown([name], PEERS, "peer")
        if not Path(python).is_file():
            raise FileNotFoundError(f"--peer {text}: there is no {python}; make the environment first (docs/bench.md)")
        found[name] = Path(python)
    return found


def check_decoders(texts: Sequence[str], peers: Container[str], checkpoints: Path | None) -> None:
    """ValueError or FileNotFoundError for a text that names no decoder, or one that needs a peer's environment that was
    not given. checkpoints: as in heads_folder."""
    refuse_unknown_drafters(texts, shipped.names_in(checkpoints))
    for text in texts:
        peer = parse_decoder(text).peer
        if peer is not None and peer not in peers:
            raise ValueError(
                f"decoder {text!r} needs an environment of its own: give --peer {peer}=PYTHON (docs/bench.md)"
            )


def bench(
    models: Models, checkpoints: Path | None, options: BenchOptions, sets: list[prompt_sets.PromptSet], out: Path, *,
    peers: Mapping[str, Path], plots: bool, command: str,
) -> dict[str, Any]:  # fmt: skip
    """Measure and write the files → the record of bench.json, with the files written. Progress goes to stderr."""
    if plots:
        require_matplotlib()  # before hours of measuring, not after them
    workers = {
        # -I: adds neither this environment's paths nor the worker's own folder, whose files would shadow packages.
        name: Peer(name, [str(python), "-I", str(PEERS[name])], (out / "peers" / name).resolve())
        for name, python in peers.items()
    }
    longest = max(one.longest(options.max_new_tokens) for one in sets)
    setup = BenchSetup(models, checkpoints, options.max_new_tokens, longest, workers)
    where, floor = environment.environment(), measure_floor(models.target)
    try:
        versions = {name: version for peer in workers.values() for name, version in peer.ask("versions").items()}
        with terminal.progress(terminal.make_console(stderr=True), "measuring") as tell:
            outcome = run(options, setup, sets, out, tell)
    finally:
        for peer in workers.values():
            peer.close()
    record = {
        "command": command, "environment": where, "peers": versions, "reference": options.reference,
        "dtype": str(models.target.dtype).removeprefix("torch."), "max_new_tokens": options.max_new_tokens,
        "lowest_limit": options.lowest_limit, "queue": options.queue, "turns": options.turns,
        "repeats": options.repeats, "seed": options.seed, "floor": floor.to_dict(), "complete": outcome.complete,
        "prompt_sets": {one.name: {"prompts": len(one.ids), "note": one.note} for one in sets},
        "left_out": outcome.left_out,
        "rows": report.rows_of(outcome.rounds, options.reference, floor.seconds),
        "rounds": outcome.rounds,
    }  # fmt: skip
    files = report.write(out, record, plots=plots)
    return {**record, "files": [str(path) for path in files]}


def show(record: dict[str, Any], *, wide: bool = False) -> None:
    """Print the tables, their notes and the files' paths on stdout. wide: every column, as in bench.md."""
    for table in report.tables(record["rows"], wide=wide):
        # The title is printed separately: in the table it would be wrapped at the table's width.
        shown = terminal.as_text(terminal.table("", table.columns, table.lines)).strip("\n")
        print(f"{table.title}\n{shown}\n")
    for line in (*(report.LEGEND if wide else report.NARROW_LEGEND), *report.notes(record)):
        print(line)
    print(environment.line(record["environment"]))
    print("written: " + ", ".join(record["files"]))
