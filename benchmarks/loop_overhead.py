"""The cost of the loop itself: the share of a step outside the base's and head's forwards, and what the host reads.

    python benchmarks/loop_overhead.py --out docs/benchmarks

Greedy, float32, EAGLE-3's default tree. The base's forward, its embedding and output matrix, and the head's own modules
are timed from outside; the rest of a step's wall time is the loop's. A second, untimed run notes every tensor whose
values Python reads, and reports the largest: logits would have B × N × V values.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers.utils import logging as hf_logging

from specheads.bench import environment, report, shipped
from specheads.bench.prompts import held_out_prompts
from specheads.decoding.generation import prompt_batches
from specheads.decoding.loop import decode

# Reading any of these waits for the device and copies to the host.
READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class ForwardTimer:
    """Sums the wall time inside some functions; nested calls count once."""

    def __init__(self) -> None:
        self.seconds, self.depth = {"base": 0.0, "head": 0.0}, 0

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # transformers inspects forward's parameters
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()  # first, so that timing itself does not count as the loop's
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds[kind] += time.perf_counter() - began

        return call


@contextmanager
def timing(model: Any) -> Iterator[ForwardTimer]:
    """In the block, time the base's forward, the head's modules, and the base's embedding and output matrix when the
    head uses them."""
    timer = ForwardTimer()
    base, head = model.base, model.head
    patched = [(base, "forward", "base")]
    patched += [(module, "forward", "head") for module in head.modules() if not isinstance(module, torch.nn.ModuleList)]
    patched += [(head, name, "head") for name in ("fuse", "draft_logits") if hasattr(head, name)]
    patched += [(module, "cached", "head") for module in head.modules() if hasattr(module, "cached")]
    patched += [(base.get_input_embeddings(), "forward", "head"), (base.get_output_embeddings(), "forward", "head")]
    with ExitStack() as stack:
        for owner, name, kind in patched:
            stack.enter_context(mock.patch.object(owner, name, timer.timed(kind, getattr(owner, name))))
        yield timer


@contextmanager
def noting_reads() -> Iterator[list[tuple[int, str]]]:
    """(number of values, method) of every tensor whose values Python reads in the block."""
    found: list[tuple[int, str]] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append((self.numel(), name))
            return original(self, *args, **kwargs)

        return read

    originals = {name: getattr(torch.Tensor, name) for name in READS}
    for name, original in originals.items():
        setattr(torch.Tensor, name, noted(name, original))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, help="the folder with base/ and the head (default: shipped)")
    parser.add_argument("--head", default="eagle3", help="name of the head in that folder")
    parser.add_argument("--out", type=Path, required=True, help="the folder for loop_overhead.md and .json")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--require", action="store_true", help="exit 1 if the loop's share exceeds 10 %% at batch 1")
    options = parser.parse_args()

    hf_logging.disable_progress_bar()
    folder = shipped.find_base(options.checkpoints)
    base, tokenizer = shipped.load_base(folder, "cpu")
    (model,) = shipped.load_heads(base, folder.parent, [options.head]).values()
    held_out = shipped.held_out_names(folder)
    prompts = held_out_prompts(tokenizer, max(options.batch_sizes), 64, held_out)
    rows: list[list[str]] = []
    record: dict[str, Any] = {}
    for size in options.batch_sizes:
        (batch,) = prompt_batches.batches(tokenizer, prompts[:size], base.device, size)
        figures = measured(model, batch, options.max_new_tokens, options.repeats)
        record[f"batch_{size}"] = figures
        limit = figures["tree_nodes"] * size * base.config.vocab_size
        rows.append([
            str(size), f"{1e3 * figures['step_seconds']:.2f}", f"{figures['base_share']:.1%}",
            f"{figures['head_share']:.1%}", f"{figures['loop_share']:.1%}",
            f"{figures['largest_read']:,} of {limit:,} ({figures['largest_read_by']})",
        ])  # fmt: skip
    where = environment.environment()
    command = "python benchmarks/loop_overhead.py " + " ".join(sys.argv[1:])
    columns = ("batch", "a step, ms", "base", "head", "the loop's own", "largest tensor read by the host, of B × N × V")
    text = "\n".join([
        "# The loop's own time\n", f"`{command}`\n", f"{environment.line(where)}.\n",
        f"{options.head}, its default tree, greedy, float32, {options.max_new_tokens} tokens; medians of "
        f"{options.repeats} runs. Prefill left out.\n", report.markdown(columns, rows),
    ])  # fmt: skip
    report.write(options.out, "loop_overhead", text, {"command": command, "environment": where, **record})
    print(text)
    return int(options.require and record["batch_1"]["loop_share"] > 0.10)


def measured(model: Any, batch: dict[str, Any], max_new_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over runs; shares are of the steps' wall time, without the prefill."""
    ask = {**batch, "draft": "head", "max_new_tokens": max_new_tokens}
    ask |= {"do_sample": False, "return_dict_in_generate": True}
    model.generate(**ask)  # warm-up
    seconds: list[float] = []
    shares: dict[str, list[float]] = {"base": [], "head": [], "loop": []}
    with timing(model) as timer:
        for _ in range(repeats):
            marks = Marks(timer)
            with mock.patch("specheads.decoding.generation.decoding.decode", marks.wrapping(decode)):
                steps = model.generate(**ask).steps
            whole = sum(step.seconds for step in steps[1:])
            spent = {kind: timer.seconds[kind] - marks.after_prefill[kind] for kind in ("base", "head")}
            seconds.append(whole / (len(steps) - 1))
            for kind, value in spent.items():
                shares[kind].append(value / whole)
            shares["loop"].append(1 - sum(spent.values()) / whole)
    with noting_reads() as found:
        steps = model.generate(**ask).steps
    largest = max(found)
    return {
        "step_seconds": median(seconds), "steps": len(steps) - 1, "tree_nodes": steps[1].drafted[0] + 1,
        "base_share": median(shares["base"]), "head_share": median(shares["head"]),
        "loop_share": median(shares["loop"]), "loop_shares": shares["loop"],
        "largest_read": largest[0], "largest_read_by": largest[1].strip("_"),
    }  # fmt: skip


class Marks:
    """The timer's reading at the end of the prefill."""

    def __init__(self, timer: ForwardTimer) -> None:
        self.timer, self.after_prefill = timer, dict(timer.seconds)

    def wrapping(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Iterator[Any]:
            for number, step in enumerate(decode(*args, **kwargs)):
                if number == 0:
                    self.after_prefill = dict(self.timer.seconds)
                yield step

        return wrapped


if __name__ == "__main__":
    sys.exit(main())
