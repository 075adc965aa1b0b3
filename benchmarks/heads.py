"""Every head, and every loss on EAGLE-3, after the same training: how many tokens a step they yield, and their cost.

Where they are not called as published, EAGLE-3 has `norm_before_residual`, and EAGLE-1 learns without noise from three
steps of its own drafts, as in HASS (arXiv:2408.15766).

    python train/self_distill.py --base checkpoints/base --output runs/own.jsonl --num_rows 864 --batch_size 96 \\
        --max_new_tokens 112 --dtype float32
    python benchmarks/heads.py --data runs/own.jsonl --out docs/benchmarks

Each variant sees the same rows in the same order, for the same steps, with the same optimizer. Then it decodes held-out
files with the real loop: greedily and sampled at temperature 1, by a chain of five drafts and by a tree of 16 nodes.
Training speed is in tokens a second of CPU time (of wall time on a GPU); peak memory is of one training step, beyond
base and head, counted tensor by tensor. Each variant's figures are kept in OUT/heads/, and a variant that is there
already is not run again: several processes can share the work with --only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging as hf_logging

import specheads
from specheads import BestFirstTree, Collator, DynamicTree, SampledTree, chain
from specheads.bench import decoders, environment, report
from specheads.bench.memory import LiveMemory
from specheads.bench.prompts import held_out_prompts
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets, token_counts
from specheads.decoding.generation import prompt_batches
from specheads.heads.vocabulary import DraftVocabulary
from specheads.losses.functions import DISTRIBUTION_LOSSES
from specheads.models.files import replacing

DEPTH, NODES, VOCAB = 5, 16, 2048
EAGLE3 = {"steps": DEPTH, "draft_vocab_size": VOCAB}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"num_heads": DEPTH, "draft_vocab_size": VOCAB}),
    "eagle, as published": ("eagle", {"steps": 1, "noise": 0.1}),
    "eagle": ("eagle", {"steps": 3, "noise": 0.0}),
    "hydra": ("hydra", {"num_heads": DEPTH, "draft_vocab_size": VOCAB}),
    "hydra++": ("hydra", {"num_heads": DEPTH, "draft_vocab_size": VOCAB, "prefix_layer": True}),
    "eagle3, as published": ("eagle3", {**EAGLE3, "norm_before_residual": False}),
    "eagle3": ("eagle3", EAGLE3),
    "parallel": ("parallel", {"block_size": DEPTH, "draft_vocab_size": VOCAB, "anchors": 64}),
    "parallel, every anchor": ("parallel", {"block_size": DEPTH, "draft_vocab_size": VOCAB}),
    **{
        f"eagle3, {name}": ("eagle3", {**EAGLE3, "loss": name})
        for name in DISTRIBUTION_LOSSES if name not in ("ce", "kl")  # whose gradients are the same
    },
    "eagle3, D-PACE": ("eagle3", {**EAGLE3, "dpace": 0.5}),
}  # fmt: skip


class Clock(TrainerCallback):
    """Time between the first and the last step, without what stands around training."""

    def __init__(self, device: torch.device) -> None:
        self.now = time.process_time if device.type == "cpu" else time.perf_counter
        self.marks: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append(self.now())


def trained(kind: str, head: dict[str, Any], rows: Any, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model of a variant, and what its training took."""
    torch.manual_seed(options.seed)
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).to(options.device)
    model = specheads.convert(base, kind, **head).to(options.device)
    if isinstance(model.head, DraftVocabulary) and model.head.target_ids is not None:
        model.head.set_draft_vocabulary(token_counts(rows, len(model.head.t2d)), base)
    clock = Clock(torch.device(options.device))
    with tempfile.TemporaryDirectory() as folder:
        arguments = specheads.SpecTrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate, muon=True, lr_scheduler_type="linear", warmup_steps=0.03,
            max_grad_norm=1.0, adam_beta2=0.95, seed=options.seed, report_to=[], save_strategy="no",
            use_cpu=options.device == "cpu", disable_tqdm=True, logging_steps=50,
        )  # fmt: skip
        trainer = specheads.SpecTrainer(
            model, arguments, train_dataset=rows, data_collator=Collator(0), callbacks=[clock]
        )
        trainer.train()
    batch = Collator(0)([rows[i] for i in range(options.batch_size)])
    batch = {name: value.to(options.device) for name, value in batch.items()}
    tokens = options.batch_size * options.max_length
    seconds = (clock.marks[-1] - clock.marks[0]) / (len(clock.marks) - 1)
    with LiveMemory() as memory:
        model(**batch).loss.backward()
    model.zero_grad()
    parameters = sum(p.numel() for p in model.head.parameters())
    return model.eval(), {
        "parameters": parameters, "tokens_per_second": tokens / seconds, "peak_mib": memory.peak / 2**20,
    }  # fmt: skip


def measured(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, float]:
    """Accepted length of real decoding, by temperature and shape."""
    prompts = held_out_prompts(tokenizer, options.num_prompts)
    batches = prompt_batches.batches(tokenizer, prompts, model.device)
    tree = BestFirstTree(NODES, DEPTH, 4) if model.head.config.kind == "parallel" else DynamicTree(NODES, DEPTH, 4)
    asked = {
        "greedy chain": {"do_sample": False, "tree": chain(DEPTH)},
        "greedy tree": {"do_sample": False, "tree": tree},
        "sampled chain": {"do_sample": True, "tree": SampledTree((1,) * DEPTH), "seed": 0},
        "sampled tree": {"do_sample": True, "tree": SampledTree((3, 2, 1)), "seed": 0},
    }
    return {
        name: decoders.accepted_length(model, batches, max_new_tokens=options.max_new_tokens, **given)
        for name, given in asked.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="checkpoints/base")
    parser.add_argument("--data", nargs="+", required=True, help="rows the base wrote itself")
    parser.add_argument("--out", type=Path, required=True, help="the folder for heads.md, heads.json and heads/")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="run these alone")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=176)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    hf_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    rows, _ = build_datasets(DataConfig(train=options.data, max_length=options.max_length), tokenizer)
    folder = options.out / "heads"
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        path = folder / f"{name.replace(', ', '_').replace('+', 'p')}.json"
        if path.exists():
            continue
        kind, head = VARIANTS[name]
        model, cost = trained(kind, head, rows, options)
        record = {
            "variant": name,
            "budget": budget(options),
            **cost,
            "accepted_length": measured(model, tokenizer, options),
        }
        with replacing(path) as partial:
            partial.write_text(json.dumps(record, indent=2) + "\n", "utf8")
        print(json.dumps(record), flush=True)
    show(folder, options, len(rows))
    return 0


def budget(options: argparse.Namespace) -> dict[str, Any]:
    names = ("steps", "batch_size", "max_length", "learning_rate", "num_prompts", "max_new_tokens", "seed")
    return {name: getattr(options, name) for name in names}


def show(folder: Path, options: argparse.Namespace, rows: int) -> None:
    """heads.md and heads.json of all variants that are there."""
    found = {
        record["variant"]: record for path in folder.glob("*.json") for record in [json.loads(path.read_text("utf8"))]
    }
    records = [found[name] for name in VARIANTS if name in found]
    if len({json.dumps(record["budget"]) for record in records}) > 1:
        raise SystemExit(f"{folder} holds variants of several budgets: empty it, or ask for the same one again")
    shapes = list(records[0]["accepted_length"])
    table = [
        [
            r["variant"], f"{r['parameters'] / 1e6:.2f} M", *(f"{r['accepted_length'][shape]:.2f}" for shape in shapes),
            f"{r['tokens_per_second']:,.0f}", f"{r['peak_mib']:,.0f} MiB",
        ]
        for r in records
    ]  # fmt: skip
    where, spent = environment.environment(), records[0]["budget"]
    command = f"python benchmarks/heads.py --data {' '.join(options.data)} --out {options.out} --steps {spent['steps']}"
    text = "\n".join([
        "# Every head and every loss after the same training\n", f"`{command}`\n", f"{environment.line(where)}.\n",
        f"{spent['steps']} steps of {spent['batch_size']} rows of at most {spent['max_length']} tokens, of {rows} that "
        f"the base wrote itself; accepted length (tokens a step) on {spent['num_prompts']} prompts of held-out files × "
        f"{spent['max_new_tokens']} tokens.\n",
        report.markdown(("head", "parameters", *shapes, "training tokens/s", "peak memory"), table),
    ])  # fmt: skip
    report.write(options.out, "heads", text, {"command": command, "environment": where, "variants": records})
    print(text)


if __name__ == "__main__":
    sys.exit(main())
