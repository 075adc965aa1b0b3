"""Base models' loss on text, and how much the text they generate repeats itself: before and after further training.

    python benchmarks/base_text.py checkpoints/base out/base --out docs/benchmarks

Loss: nats per token over 256 tokens of each of 70 held-out files and 200 files of third-party code, which nothing here
is trained on. Repeated: the share of new tokens that complete an 8-gram that the prompt or the text already contained,
over 60 prompts from each of the two sets × 192 tokens, greedy and sampled at temperature 0.8. Intervals: 95 %, by
resampling the files or prompts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specheads import generate_many
from specheads.bench import environment, report
from specheads.bench.figures.intervals import ratio_interval
from specheads.bench.figures.samples import repeated
from specheads.bench.prompts import held_out_prompts, package_prompts

WINDOW, WINDOWS = 256, {"held-out files": 70, "third-party code": 200}
PROMPT, PROMPTS = 64, 60


def texts(tokenizer: Any, counts: dict[str, int], num_tokens: int) -> dict[str, list[list[int]]]:
    """Set → token ids of pieces of its texts. counts: number of pieces by set."""
    held_out, packages = counts.values()
    pieces = {
        "held-out files": held_out_prompts(tokenizer, held_out, num_tokens),
        "third-party code": [one.asked for one in package_prompts(tokenizer, packages, num_tokens)[0]],
    }
    return {name: [tokenizer(str(text))["input_ids"] for text in found] for name, found in pieces.items()}


@torch.no_grad()
def nats(base: PreTrainedModel, ids: list[int]) -> tuple[float, float]:
    """The summed loss of a text in nats, and its number of predicted tokens."""
    row = torch.tensor([ids])
    return float(base(input_ids=row, labels=row, use_cache=False).loss) * (len(ids) - 1), len(ids) - 1


def figure(work: list[tuple[float, float]]) -> dict[str, Any]:
    """The ratio of two sums, and its interval. work: numerator and denominator of each file or prompt."""
    interval = ratio_interval(work, [(1.0, 1.0)] * len(work))
    return {"value": sum(a for a, _ in work) / sum(b for _, b in work), "interval": interval, "count": len(work)}


def measure(folder: str, new_tokens: int, share: float) -> dict[str, dict[str, Any]]:
    """One model's figures by name. share: of the windows and prompts to use."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    windows = {name: max(2, round(count * share)) for name, count in WINDOWS.items()}
    for name, rows in texts(tokenizer, windows, WINDOW).items():
        found[f"loss, {name}"] = figure([nats(base, row) for row in rows])
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False}, "T = 0.8": {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 0}
    }  # fmt: skip
    for name, rows in texts(tokenizer, dict.fromkeys(WINDOWS, max(2, round(PROMPTS * share))), PROMPT).items():
        for way, options in ways.items():
            options = {**options, "max_new_tokens": new_tokens, "draft": "lookup"}
            written = generate_many(base, rows, **options)
            marks = [repeated([*one.prompt, *one.tokens])[len(one.prompt) :] for one in written]
            found[f"repeated, {way}, {name}"] = figure([(sum(row), len(row)) for row in marks])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or hub ids of base models")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--share", type=float, default=1.0, help="of the windows and prompts; 0.1 for a quick look")
    parser.add_argument("--out", type=Path, default=Path("runs/base_text"), help="folder for base_text.md and .json")
    options = parser.parse_args()

    results = {folder: measure(folder, options.max_new_tokens, options.share) for folder in options.models}
    rows = []
    for name in next(iter(results.values())):
        cells = [name]
        for found in results.values():
            low, high = found[name]["interval"]
            cells.append(f"{found[name]['value']:.3f} ({low:.3f}–{high:.3f})")
        rows.append(cells)
    where, command = environment.environment(), " ".join(["python", "benchmarks/base_text.py", *sys.argv[1:]])
    table = report.markdown(("", *options.models), rows)
    text = f"# What base models know, and how much they repeat\n\n`{command}`\n\n{environment.line(where)}\n\n{table}\n"
    for path in report.write(options.out, "base_text", text, {
        "command": command, "environment": where, "models": results
    }):  # fmt: skip
        print(f"written: {path}")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
