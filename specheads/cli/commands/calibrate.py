"""`specheads calibrate`: finds the best static tree for a head from its ranks on data, and saves it with the head."""

from __future__ import annotations

from typing import Any

from specheads import terminal
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets
from specheads.decoding.verify.hf_base import text_config
from specheads.models.calibration import calibrate_tree, expected_length, measure_ranks
from specheads.models.spec_model import SpecModel

SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64)


def calibrate(
    model: SpecModel, tokenizer: Any, data: list[str], *, num_nodes: int, max_depth: int | None, max_rows: int,
    max_length: int,
) -> dict[str, Any]:  # fmt: skip
    """The best tree of `num_nodes`, and the accepted lengths on the data of it and of the best trees of other sizes."""
    config = DataConfig(train=data, max_samples=max_rows, max_length=max_length)
    rows, _ = build_datasets(config, tokenizer, text_config(model.base).vocab_size)
    with terminal.progress(terminal.make_console(stderr=True), "measuring ranks") as report:
        ranks = measure_ranks(model, rows, report=lambda done: report(done, f"{len(rows)} rows"))
    tree = calibrate_tree(ranks, num_nodes, max_depth)
    sizes = sorted({*SIZES, num_nodes})
    return {
        "positions": len(ranks), "tree": tree.choices, "accepted_length": expected_length(tree, ranks),
        "by_nodes": {size: expected_length(calibrate_tree(ranks, size, max_depth), ranks) for size in sizes},
    }  # fmt: skip


def show(record: dict[str, Any]) -> None:
    out = terminal.make_console()
    rows = [[str(size), f"{length:.3f}"] for size, length in record["by_nodes"].items()]
    title = f"the best tree of each size at {record['positions']:,} positions"
    terminal.print_table(out, terminal.table(title, ("nodes", "accepted length"), rows))
    choices = " ".join("".join(f"{rank}." for rank in choice).rstrip(".") for choice in record["tree"])
    out.print(f"{len(record['tree']) + 1} nodes, accepted length {record['accepted_length']:.3f}: {choices}")
