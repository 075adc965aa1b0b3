"""`specheads tune`: measures what a step costs on this machine, and says which head and tree would be fastest."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from specheads import terminal
from specheads.bench.compare.recorded import load_record
from specheads.bench.prompts import held_out_prompts
from specheads.bench.tune import TuneConfig, merge, tune
from specheads.bench.tune.tree_search import (
    Candidate,
    acceptance_of,
    mean_length,
    recorded_ranks,
    search_copies,
    search_head,
)
from specheads.cli.app import emit
from specheads.cli.errors import refuse_file, refuse_folder
from specheads.cli.options.measure import TuneOptions
from specheads.decoding.generation.recorded import Record, record
from specheads.decoding.planner.by_cost import CostTable, costs_dir
from specheads.heads import DraftHead
from specheads.models.base.fingerprint import fingerprint_base, record_base
from specheads.models.config import SpecConfig
from specheads.models.costs import cost_path
from specheads.models.named import Models, describe_drafter
from specheads.models.spec_model import SpecModel

PROMPTS, LENGTH = 16, 96  # of a new record: number of prompts, and new tokens for each


def run(options: TuneOptions) -> None:
    for flag, path in (("--output", options.output), ("--search", options.search)):
        if path is not None:
            refuse_folder(path, flag)
    if options.output is None:
        refuse_file(costs_dir(), "HF_HOME")
    config = TuneConfig(
        options.batch, tuple(options.nodes or ()), tuple(options.lengths or TuneConfig.lengths), rounds=options.rounds,
        compile=options.compile,
    )  # fmt: skip
    results = []
    for name in options.models:
        models = Models.load(
            name, base=options.base, dtype=options.dtype, device=options.device, quantize=options.quantize
        )
        texts = None if options.search is None else record_at(options.search, models)
        results.append({"model": name, **measure(models, config, output=options.output, recorded=texts)})
    if options.as_json:
        emit({"results": results})
    else:
        show(results)


def measure(models: Models, config: TuneConfig, *, output: Path | None, recorded: Record | None) -> dict[str, Any]:
    """Measure one model, write its cost file and, with a record, search it for the fastest head and tree."""
    head = models.drafters.get("head")
    head = head if isinstance(head, DraftHead) else None
    name = "no head" if head is None else describe_drafter("head", head)
    with terminal.progress(terminal.make_console(stderr=True), f"measuring {name}") as report:
        measured = tune(models.target, head, config, report)
    key = measured.key
    assert key is not None
    path = cost_path(key) if output is None else output
    candidates: list[Candidate] = []
    if recorded is not None:
        costs, length = measured.batches[config.batch], mean_length(recorded)
        candidates = search_copies(recorded, costs, length)
        if head is not None:
            model = SpecModel(record_base(SpecConfig.of(head.config), models.target), models.target, head)
            texts = recorded_ranks(model, recorded)
            measured = replace(measured, acceptance=acceptance_of(torch.cat(texts)))
            candidates += search_head(name, texts, costs, length)
    table = merge(_saved(path), measured)
    table.save(path)
    return {
        "drafter": name, "file": str(path), "batch": config.batch, "key": asdict(key),
        "batches": sorted(table.batches), **measured.batches[config.batch].to_dict(), "acceptance": measured.acceptance,
        "search": [{**asdict(candidate), "tokens_per_second": candidate.tokens_per_second} for candidate in candidates],
    }  # fmt: skip


def record_at(path: Path, models: Models) -> Record:
    """The record in a file; if missing, it is first generated: the base's greedy text after held-out prompts.
    ValueError if it is of another base."""
    if not path.exists():
        ids = [models.tokenizer(text)["input_ids"] for text in held_out_prompts(models.tokenizer, PROMPTS)]
        with terminal.progress(terminal.make_console(stderr=True), "recording the base's text") as report:
            report(0.0, f"{PROMPTS} prompts, {LENGTH} tokens each")
            with torch.no_grad():
                new = record(models.target, ids, LENGTH)
            replace(new, base=fingerprint_base(models.target)).save(path)
            report(1.0, str(path))
    return load_record(path, models.target)


def _saved(path: Path) -> CostTable | None:
    """The table in the file so far; None if there is no file, or this version cannot read it and will replace it."""
    try:
        return CostTable.load(path)
    except (OSError, ValueError):
        return None


def show(results: list[dict[str, Any]]) -> None:
    out = terminal.make_console()
    for result in results:
        lengths = list(result["verify"])
        rows = []
        for i, (nodes, _) in enumerate(result["verify"][lengths[0]]):
            verify = [f"{result['verify'][length][i][1]:.2f}" for length in lengths]
            rows.append([f"{nodes:g}", *verify, f"{result['loop'][i][1]:.2f}"])
        columns = ("nodes", *(f"verify after {length}" for length in lengths), "rest of the loop")
        title = f"{result['drafter']}, batch {result['batch']}: milliseconds"
        terminal.print_table(out, terminal.table(title, columns, rows))
        for curve, what in (("read", "positions read and the first level"), ("level", "nodes of a further level")):
            if result[curve]:
                points = ", ".join(f"{count:g}: {ms:.2f}" for count, ms in result[curve])
                out.print(f"drafting, ms by {what}: {points}")
        out.print(f"saved as {result['file']}")
    candidates = sorted((row for r in results for row in r["search"]), key=lambda row: -row["tokens_per_second"])
    if candidates:
        rows = [
            [row["drafter"], row["tree"], str(row["nodes"]), f"{row['accepted_length']:.2f}", f"{row['ms']:.2f}",
             f"{row['tokens_per_second']:.1f}"]
            for row in candidates
        ]  # fmt: skip
        columns = ("drafter", "tree", "nodes", "accepted length", "ms/step", "tokens/s")
        title = f"Expected from the record and these costs, batch {candidates[0]['batch']}"
        terminal.print_table(out, terminal.table(title, columns, rows, left=2))
