"""How fast: draft heads against transformers' own generate() on held-out prompts, in one run.

    python benchmarks/decode.py --out docs/benchmarks
    python benchmarks/decode.py --batch-sizes 1 --num-prompts 4 --repeats 1 --out /tmp/decode

Greedy, float32. Per batch size every decoder runs on the same prompts in turn; figures are medians over repeats and
speed-ups are medians of the ratios inside one repeat. At batch 1 transformers' prompt lookup runs too, for reference
(it takes no batches), and new text is reported apart from text that repeats itself, which flatters every drafter.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.bench import decoders, environment, report, runner, shipped
from specheads.bench.decoders import REFERENCE
from specheads.bench.prompts import held_out_prompts
from specheads.decoding.generation import prompt_batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, help="the folder of base/ and the heads (default: shipped)")
    parser.add_argument("--out", type=Path, required=True, help="the folder for decode.md and decode.json")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--require", action="store_true", help="exit 1 if EAGLE-3 misses 1.7× or 2.5 at batch 1")
    options = parser.parse_args()

    hf_logging.disable_progress_bar()
    folder = shipped.find_base(options.checkpoints)
    base, tokenizer = shipped.load_base(folder, options.device)
    prompts = held_out_prompts(tokenizer, options.num_prompts, options.prompt_tokens, shipped.held_out_names(folder))
    errors = terminal.make_console(stderr=True)
    heads = shipped.load_heads(base, folder.parent, missing=errors.print)
    where = environment.environment()
    command = "python benchmarks/decode.py " + " ".join(sys.argv[1:])
    text = [
        "# Decoding speed\n",
        f"`{command}`\n",
        f"{environment.line(where)}.\n",
        f"{options.num_prompts} prompts of {options.prompt_tokens} tokens out of held-out files, "
        f"{options.max_new_tokens} new tokens, greedy, float32, {base.num_parameters() / 1e6:.1f}M parameters; medians "
        f"of {options.repeats} interleaved repeats. Speed-up is over transformers' `generate` in the same run.\n",
    ]
    record: dict[str, Any] = {"command": command, "environment": where, "options": _plain(vars(options))}
    for size in options.batch_sizes:
        racers = {REFERENCE: decoders.transformers_generate(base, options.max_new_tokens)}
        if size == 1:
            for count in (4, 10):
                racers[f"transformers prompt lookup, {count} tokens"] = decoders.transformers_generate(
                    base, options.max_new_tokens, prompt_lookup_num_tokens=count
                )
        racers["our loop, no drafts"] = decoders.drafted(base, options.max_new_tokens)
        for label, model in heads.items():
            racers[label] = decoders.drafted(model, options.max_new_tokens)
        with terminal.progress(errors, f"batch {size}") as tell:
            batches = prompt_batches.batches(tokenizer, prompts, base.device, size)
            result = runner.race(racers, batches, repeats=options.repeats, report=tell)
        rows = report.summary(result, REFERENCE)
        record[f"batch_{size}"] = rows
        text += [f"## Batch {size}\n", report.markdown(report.COLUMNS, [report.cells(n, r) for n, r in rows.items()])]
        if size == 1:
            parts = [report.part_cells(name, row) for name, row in rows.items()]
            text += [
                f"A token counts as repeated text if the {runner.GRAM} tokens that end with it came up before in the "
                "same generated text; a step counts with its first token.\n",
                report.markdown(report.PART_COLUMNS, parts),
            ]
    (path, _) = report.write(options.out, "decode", "\n".join(text), record)
    print(path.read_text("utf8"))
    if options.require:
        eagle = record["batch_1"]["EAGLE-3"]
        return int(eagle["speed_up"] < 1.7 or eagle["accepted_length"] < 2.5 or not eagle["identical"])
    return 0


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps({name: v for name, v in options.items() if name not in ("checkpoints", "out")}))


if __name__ == "__main__":
    sys.exit(main())
