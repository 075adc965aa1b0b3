"""The options of bench, parity, calibrate and tune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from specheads.bench.compare.options import BenchOptions
from specheads.cli.options.shared import HEAD, Output, Placement
from specheads.cli.shipped import find_recipe
from specheads.options import OptionError, argument, option


@dataclass(frozen=True, kw_only=True)
class BenchCommand(BenchOptions, Output):
    __doc__ = BenchOptions.__doc__

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        recipe = values.get("recipe")
        return super().read(values if recipe is None else {**values, "recipe": str(find_recipe(recipe, "bench"))})


@dataclass(frozen=True, kw_only=True)
class ParityOptions(Placement, Output):
    """Compare real decoding's accepted length with training's.

    Training's is what its forward computes for the text that was decoded. Training runs this at its end, if the model
    is whole on one process. The exit status is 3 if the two differ.

    \b
    Examples:
      specheads parity out/head --data my.jsonl
      specheads parity out/head --data held_out.jsonl --dtype bfloat16 \\
        --tolerance 0.05
    """

    model: str = argument("MODEL", HEAD, named=True)
    data: list[str] = option(help="Rows the head was not trained on: file, glob or hub id.")
    prompts: int = option(8, "Number of rows whose prompts are decoded.", min=1)
    max_new_tokens: int = option(64, "Maximum tokens to generate.", min=1)
    tolerance: float = option(0.02, "Largest relative difference that passes.")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Placement, Output):
    """Find the static tree that suits a head.

    It holds the drafts that were right most often on data. A larger tree accepts more and costs more to verify: choose
    the size by the printed table or with `bench --tree`.

    \b
    Examples:
      specheads calibrate out/head --data my.jsonl --num-nodes 16 --save
      specheads calibrate out/head --data my.jsonl --num-nodes 64 --max-depth 5 \\
        --json
    """

    model: str = argument("MODEL", HEAD, named=True)
    data: list[str] = option(
        help="Rows to count ranks on, as for training: files or a hub id; best is the base's own text."
    )
    num_nodes: int = option(16, "Nodes of the tree, including its root.", min=2, max=1024)
    max_depth: int | None = option(None, "Maximum depth of the tree, in drafted tokens.", min=1)
    max_length: int = option(1024, "Maximum tokens per row.", min=4)
    save: bool = option(False, "Make it the default tree of the checkpoint.")

    def __post_init__(self) -> None:
        if self.save and not Path(self.model).is_dir():
            raise OptionError(
                f"{{save}}: {self.model} is not a directory here, so its default tree cannot be written", save=True
            )


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Placement, Output):
    """Measure what a decoding step costs on this machine.

    The costs are for `--draft auto` and draft="auto". It times verification over nodes and context length, drafting
    over levels, and the rest of the loop, and writes one small file that generate() finds by base, head, device, dtype,
    batch size and whether steps are compiled. generate() never measures by itself. Let nothing else run meanwhile.

    \b
    Examples:
      specheads tune out/head
      specheads tune out/head --compile
      specheads tune out/head --batch 8 --dtype bfloat16
      specheads tune out/eagle3 out/medusa --search texts.json
      specheads tune out/head --output costs.json
    """

    models: list[str] = argument("MODEL...", "Head checkpoints or plain models, each tuned in turn.", named=True)
    batch: int = option(1, "Rows per batch; the file keeps other sizes measured by the same versions.", min=1)
    nodes: list[int] | None = option(
        None,
        "Nodes per row to time (repeatable; must include 1; default: 1 … 64, compiled 1, 6, 16 and 32).",
        min=1,
    )
    lengths: list[int] | None = option(
        None, "Tokens of context (repeatable; default: 128 and 1024).", flags=("--length",), min=1
    )
    rounds: int = option(3, "Rounds in which all measurements take turns; the fastest counts.", min=1)
    compile: bool = option(False, "Time compiled steps, for compile=True; compiling them takes minutes.")
    search: Path | None = option(
        None,
        "Also list which head and tree would be fastest on recorded texts, and save how often the head's drafts were "
        "right. Written first, from held-out prompts, if it is missing.",
        metavar="RECORD",
    )
    output: Path | None = option(None, "File to write (default: one per model and machine in HF_HOME/specheads/costs).")

    def __post_init__(self) -> None:
        if self.output is not None and len(self.models) > 1:
            raise OptionError(
                f"{{output}} is one file, and {len(self.models)} models are tuned; give one model, or leave it out",
                output=...,
            )
