"""`specheads calibrate` and `parity`: the static tree that suits a head, and whether training's accepted length is real
decoding's."""

from __future__ import annotations

from typing import Any

from specheads import terminal
from specheads.cli.app import emit, output
from specheads.cli.options.measure import CalibrateOptions, ParityOptions
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets
from specheads.data.images import processor_of
from specheads.decoding.verify.hf_base import text_config
from specheads.models.calibration import calibrate_tree, expected_length, measure_ranks
from specheads.models.checkpoint import save_default_tree
from specheads.models.named import load_with_processing
from specheads.training.parity import Parity, ParityConfig, compare, prompts_of

SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64)
MAX_ROWS = 512  # that calibrate reads, drawn at random


def find_tree(options: CalibrateOptions) -> None:
    """Print the best tree of so many nodes, and the accepted lengths on the data of it and of the best trees of other
    sizes; with --save the tree becomes the head's."""
    model, processing = load_with_processing(
        options.model, options.base, options.dtype, options.device, options.quantize
    )
    config = DataConfig(train=options.data, max_samples=MAX_ROWS, max_length=options.max_length)
    rows, _ = build_datasets(config, processing, text_config(model.base).vocab_size)
    with terminal.progress(terminal.make_console(stderr=True), "measuring ranks") as report:
        ranks = measure_ranks(
            model, rows, report=lambda done: report(done, f"{len(rows)} rows"), processor=processor_of(processing)
        )
    tree = calibrate_tree(ranks, options.num_nodes, options.max_depth)
    best = {size: calibrate_tree(ranks, size, options.max_depth) for size in sorted({*SIZES, options.num_nodes})}
    record = {
        "model": options.model, "saved": options.save, "positions": len(ranks), "tree": tree.choices,
        "accepted_length": expected_length(tree, ranks),
        "by_nodes": {size: expected_length(tree, ranks) for size, tree in best.items()},
    }  # fmt: skip
    if options.save:
        save_default_tree(options.model, tree.choices)
    output(record, show_trees, options.as_json)


def show_trees(record: dict[str, Any]) -> None:
    out = terminal.make_console()
    rows = [[str(size), f"{length:.3f}"] for size, length in record["by_nodes"].items()]
    title = f"the best tree of each size at {record['positions']:,} positions"
    terminal.print_table(out, terminal.table(title, ("nodes", "accepted length"), rows))
    choices = " ".join("".join(f"{rank}." for rank in choice).rstrip(".") for choice in record["tree"])
    out.print(f"{len(record['tree']) + 1} nodes, accepted length {record['accepted_length']:.3f}: {choices}")
    if record["saved"]:
        print(f"saved as the default tree of {record['model']}")


def check_parity(options: ParityOptions) -> int:
    """Print both accepted lengths; the exit code is 3 if they differ."""
    config = ParityConfig(options.prompts, max_new_tokens=options.max_new_tokens, tolerance=options.tolerance)
    model, processing = load_with_processing(
        options.model, options.base, options.dtype, options.device, options.quantize
    )
    data = DataConfig(train=options.data, max_samples=options.prompts)
    rows, _ = build_datasets(data, processing, text_config(model.base).vocab_size)
    with terminal.progress(terminal.make_console(stderr=True), "decoding") as report:
        parity = compare(model, prompts_of(rows, config), config, report, processor=processor_of(processing))
    if parity is None:
        raise ValueError("no prompt was answered with more than a single token: give other rows")
    if options.as_json:
        emit({**vars(parity), "holds": parity.holds})
    else:
        show_parity(parity)
    return 0 if parity.holds else 3


def show_parity(parity: Parity) -> None:
    out = terminal.make_console()
    title = "Accepted length (tokens per step, including the base's own)"
    out.print(terminal.table(title, ("", "tokens/step"), parity.rows()))
    out.print(parity.verdict)
