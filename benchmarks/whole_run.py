"""A whole training run of several epochs, ours and NVIDIA ModelOpt's: CPU time, and the heads' accepted length.

    specheads distill --base checkpoints/base --output runs/own.jsonl --num-rows 1440 --batch-size 96 \\
        --max-new-tokens 112 --dtype float32
    python benchmarks/whole_run.py --modelopt mo/bin/python --data runs/own.jsonl --out docs/benchmarks/whole_run

benchmarks/peers.py says how to create ModelOpt's environment. Every side trains an EAGLE-3 head on the same rows, all
of the same length, for the same epochs, with the same batch size, AdamW and schedule, in float32 on one thread.
"specheads" drafts from every position and runs the base at every step, as ModelOpt does. "cache" saves the base's
features first, and trains from them; "anchors" drafts beyond the first token at one position in eight only, and
"anchors alone" does so for first drafts too, which is less work. Our times are of whole runs of a recipe, including
reading and saving; ModelOpt's are of the training steps only.

Accepted length is that of greedy chains, decoded in the same loop for all, on prompts from held-out files and as many
from installed packages; intervals are 95 %, by resampling seeds and prompts. OUT/runs/ keeps each run; whatever is
there is not run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
from bootstrap import crossed_interval
from head_figures import accepted_length, marks, prompts, refuse_other_runs, shown, write
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from specheads import SpecModel, chain
from specheads.bench import decoders, environment, report
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets, token_counts
from specheads.decoding.generation import prompt_batches
from specheads.training.features.extract import save_features
from specheads.training.features.plan import SaveOptions
from specheads.training.recipe.recipe import read_recipe
from specheads.training.run import prepare

PEER = "modelopt"
OURS = {  # (saved features?, anchors?, anchors for first drafts too?)
    "specheads": (False, False, False), "specheads, cache": (True, False, False),
    "specheads, cache and anchors": (True, True, False), "specheads, cache and anchors alone": (True, True, True),
}  # fmt: skip
RUN = (
    "epochs", "batch_size", "max_length", "draft_vocab_size", "learning_rate", "num_prompts", "max_new_tokens",
)  # fmt: skip
DEPTH, WARMUP = peers.DEPTHS["eagle3"], 5  # steps of training-time test; warm-up steps of the learning rate


def train_by_recipe(side: str, seed: int, rows: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a recipe that saves the head in `folder` → its CPU seconds."""
    cache, anchors, anchor_first = OURS[side]
    with tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch) / "recipe.yaml"
        recipe.write_text(json.dumps({  # JSON is also YAML
            "base": options.base, "base_dtype": "float32",
            "head": {
                "kind": "eagle3", "steps": DEPTH, "draft_vocab_size": options.draft_vocab_size,
                "anchors": options.max_length // 8 if anchors else None, "anchor_first": anchor_first,
            },
            "data": {"train": [str(rows)], "max_length": options.max_length},
            "parity": {"prompts": 0},
            "training": {
                "output_dir": str(folder), "num_train_epochs": options.epochs, "seed": seed, "use_cpu": True,
                "per_device_train_batch_size": options.batch_size, "learning_rate": options.learning_rate,
                "lr_scheduler_type": "linear", "warmup_steps": WARMUP, "max_grad_norm": 1.0, "adam_beta2": 0.95,
                "bf16": False, "save_strategy": "no", "eval_strategy": "no", "logging_steps": 10, "disable_tqdm": True,
            },
        }))  # fmt: skip
        began = time.process_time()
        saved = Path(scratch) / "features"
        if cache:
            save_features(read_recipe(recipe), SaveOptions(saved))
        run = prepare(read_recipe(recipe, [f"features={saved}"] if cache else []))
        run.train()
        return {"cpu_seconds": time.process_time() - began, "steps": run.trainer.state.global_step}


def train_by_peer(
    seed: int, rows: list[list[int]], vocab_size: int, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Train with ModelOpt, with the rows in a new order in each epoch → the CPU seconds of its steps."""
    generator, whole = torch.Generator().manual_seed(seed), len(rows) // options.batch_size * options.batch_size
    orders = [torch.randperm(len(rows), generator=generator)[:whole] for _ in range(options.epochs)]
    ids = torch.tensor(rows)[torch.cat(orders)].view(-1, options.batch_size, options.max_length)
    table = [{"input_ids": row, "labels": row} for row in rows]
    counts = token_counts(table, vocab_size)
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch) / "batches.safetensors"
        save_file({"ids": ids.contiguous(), "counts": counts}, given)
        settings = argparse.Namespace(**{**vars(options), "seed": seed, "speculators": None})
        side = peers.Side(PEER, "eagle3", options.base, given, folder, settings)
        side.take(len(ids))
        side.finish()
    return {"cpu_seconds": sum(side.blocks[0]), "steps": len(ids)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modelopt", help="a Python with nvidia-modelopt; without it, that side is left out")
    parser.add_argument("--base", default="checkpoints/base")
    parser.add_argument("--data", nargs="+", required=True, help="rows generated by the base itself")
    parser.add_argument("--out", type=Path, required=True, help="the folder for whole_run.md, whole_run.json and runs/")
    parser.add_argument("--only", nargs="+", choices=list(OURS), default=list(OURS), help="run only these of our sides")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (weights and row order)")
    parser.add_argument("--num-rows", type=int, default=480, help="the first this many with --max-length tokens")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=176)
    parser.add_argument("--draft-vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--num-prompts", type=int, default=50, help="from each kind of source")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)

    hf_logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    rows, _ = build_datasets(DataConfig(train=options.data, max_length=options.max_length), tokenizer)
    whole = [list(row["input_ids"]) for row in rows if len(row["input_ids"]) == options.max_length][: options.num_rows]
    if len(whole) < options.batch_size:
        raise SystemExit(
            f"{len(whole)} of {len(rows)} rows have {options.max_length} tokens, and a batch takes "
            f"{options.batch_size}: give other rows, or a lower --max-length"
        )
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    asked = prompts(tokenizer, options.num_prompts)
    batches = prompt_batches.batches(tokenizer, asked, torch.device("cpu"), options.num_prompts)
    budget = {name: getattr(options, name) for name in RUN} | {"rows": len(whole)}
    budget |= marks(base, [{"input_ids": row} for row in whole], asked)
    refuse_other_runs(options.out / "runs", budget)
    sides, records = [*options.only, *([PEER] if options.modelopt else [])], []
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "rows.jsonl"
        data.write_text("".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in whole), "utf8")
        for seed in range(options.seeds):
            for i in range(len(sides)):
                side = sides[(i + seed) % len(sides)]
                folder = options.out / "runs" / f"{side.replace(', ', '-').replace(' ', '-')}-{seed}"
                path = folder / "figures.json"
                if not path.exists():
                    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was stopped
                    found = (
                        train_by_peer(seed, whole, len(tokenizer), folder, options)
                        if side == PEER
                        else train_by_recipe(side, seed, data, folder, options)
                    )
                    model = SpecModel.from_pretrained(folder, base=base).eval()
                    run = decoders.specheads_generate(model, options.max_new_tokens, plan=chain(DEPTH))
                    gains = [row[1:] for batch in batches for row in run(batch, None).gains]
                    work = [(sum(row), len(row)) for row in gains]
                    write(path, {"side": side, "seed": seed, "budget": budget, **found, "work": work})
                records.append(json.loads(path.read_text("utf8")))
                print({name: records[-1][name] for name in ("side", "seed", "cpu_seconds", "steps")}, flush=True)
    show(records, options, sys.argv[1:] if arguments is None else arguments)
    return 0


def show(records: list[dict[str, Any]], options: argparse.Namespace, arguments: list[str]) -> None:
    budget = records[0]["budget"]
    sides = list(dict.fromkeys(record["side"] for record in records if record["seed"] == 0))
    found = {side: sorted((r for r in records if r["side"] == side), key=lambda r: r["seed"]) for side in sides}
    work = {side: torch.tensor([r["work"] for r in each]).double() for side, each in found.items()}
    seconds = {side: torch.tensor([r["cpu_seconds"] for r in each]).double() for side, each in found.items()}
    reference = PEER if PEER in found else sides[0]

    def difference(side: str) -> str:
        more = float(accepted_length(work[side]) - accepted_length(work[reference]))
        return shown(more, crossed_interval(work[side], work[reference]), sign="+")

    table = [
        [
            side,
            f"{seconds[side].mean():,.0f}",
            " / ".join(f"{ratio:.2f}×" for ratio in (seconds[reference] / seconds[side]).tolist()),
            shown(float(accepted_length(work[side])), crossed_interval(work[side])),
            "–" if side == reference else difference(side),
            f"{float(accepted_length(work[side]) - 1) / float(seconds[side].mean()) * 3600:.1f}",
        ]
        for side in found
    ]
    command = "python benchmarks/whole_run.py " + shlex.join(
        "mo/bin/python" if word == options.modelopt else word for word in arguments
    )
    where = environment.environment()
    text = "\n".join([
        "# Whole training runs beside ModelOpt's\n", f"`{command}`\n",
        f"{environment.line(where)}. One thread, float32.\n",
        f"EAGLE-3, {budget['epochs']} epochs of {budget['rows']:,} rows × {budget['max_length']} tokens, "
        f"{budget['batch_size']} a step, AdamW at {budget['learning_rate']:g}, {DEPTH} steps of training-time test "
        f"over a draft vocabulary of {budget['draft_vocab_size']:,}. Ours are whole runs of a recipe, with reading and "
        "saving; of ModelOpt the steps alone are counted. Anchors are less work: the drafts after the first at one "
        "position in eight; anchors alone: the first ones there, too. Accepted length: tokens a step of greedy chains "
        f"of {DEPTH} on {2 * options.num_prompts} prompts × {options.max_new_tokens} tokens, with 95 % intervals over "
        "seeds and prompts; seeds are few, so they are somewhat too narrow. Speed by seed.\n",
        report.markdown(
            ("program", "CPU seconds", f"{reference}'s by its own", "accepted length", f"minus {reference}'s",
             "drafts accepted a step, by CPU hour"), table,
        ),
    ])  # fmt: skip
    report.write(options.out, "whole_run", text, {"command": command, "environment": where, "runs": records})
    print(text)


if __name__ == "__main__":
    sys.exit(main())
