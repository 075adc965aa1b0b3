"""Every head, and every loss on EAGLE-3, after the same training: their tokens per step and their cost.

Unless called "as published", EAGLE-3 has `norm_before_residual`, and EAGLE-1 is trained without noise on three steps of
its own drafts, as in HASS (arXiv:2408.15766). "mtp, wide" has as many parameters as EAGLE-3: its layer's MLP is wider
than the base's.

    specheads distill --base checkpoints/base --output runs/own.jsonl --num-rows 1440 --batch-size 96 \\
        --max-new-tokens 112 --dtype float32
    python benchmarks/heads.py --data runs/own.jsonl --out docs/benchmarks --bf16

With the same seed, all variants see the same rows in the same order, for the same steps, with the same optimizer. Each
then decodes prompts from held-out files and as many from installed packages with the real loop, in float32 and many at
a time: with a chain of five drafts and a tree of 16 nodes, greedily and sampled at temperature 1. Intervals are 95 %,
by resampling seeds and prompts; differences pair the same seeds and prompts. Training speed is in tokens per second of
CPU time (wall time on a GPU); peak memory is that of one training step, beyond base and head, counted tensor by tensor.

OUT/heads/ keeps each head and its figures by variant and seed; whatever is there is not run again. Several processes
can share the work with --only, and more --shapes can be decoded later.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bootstrap import crossed_interval
from head_figures import accepted_length, marks, prompts, refuse_other_runs, shown, write
from live_memory import LiveMemory
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging as hf_logging

import specheads
from specheads import BestFirstTree, Collator, DynamicTree, SampledTree, chain
from specheads.bench import decoders, environment, report
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets, token_counts
from specheads.decoding.generation import prompt_batches
from specheads.decoding.probs.randomness import row_seeds
from specheads.heads.mtp.target_layers import config_table
from specheads.heads.vocabulary import DraftVocabulary
from specheads.losses.functions import DISTRIBUTION_LOSSES

DEPTH, NODES, VOCAB = 5, 16, 2048
EAGLE3 = {"steps": DEPTH, "draft_vocab_size": VOCAB}
WIDE = "mtp, wide"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp": ("mtp", {"steps": DEPTH}),
    "eagle3": ("eagle3", EAGLE3),
    WIDE: ("mtp", {"steps": DEPTH}),
    **{
        f"eagle3, {name}": ("eagle3", {**EAGLE3, "loss": name})
        for name in DISTRIBUTION_LOSSES if name not in ("ce", "kl")  # their gradients are the same
    },
    "eagle3, D-PACE": ("eagle3", {**EAGLE3, "dpace": 0.5}),
    "eagle3, as published": ("eagle3", {**EAGLE3, "norm_before_residual": False}),
    "medusa": ("medusa", {"num_heads": DEPTH, "draft_vocab_size": VOCAB}),
    "eagle, as published": ("eagle", {"steps": 1, "noise": 0.1}),
    "eagle": ("eagle", {"steps": 3, "noise": 0.0}),
    "hydra": ("hydra", {"num_heads": DEPTH, "draft_vocab_size": VOCAB}),
    "hydra++": ("hydra", {"num_heads": DEPTH, "draft_vocab_size": VOCAB, "prefix_layer": True}),
    "parallel": ("parallel", {"block_size": DEPTH, "draft_vocab_size": VOCAB, "anchors": 64}),
    "parallel, every anchor": ("parallel", {"block_size": DEPTH, "draft_vocab_size": VOCAB}),
}  # fmt: skip
REFERENCE = "eagle3"  # what others are compared with; if it was not run, the first one
SHAPES = ("greedy chain", "greedy tree", "sampled chain", "sampled tree")
OPTIONAL = ("base", "batch_size", "max_length", "learning_rate", "num_prompts", "max_new_tokens")  # of the command
BUDGET = ("steps", "batch_size", "max_length", "learning_rate", "bf16", "num_prompts", "max_new_tokens")


class Clock(TrainerCallback):
    """The time from the first to the last training step, without setup and saving."""

    def __init__(self, device: torch.device) -> None:
        self.now = time.process_time if device.type == "cpu" else time.perf_counter
        self.marks: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.marks.append(self.now())


def untrained(name: str, base: Any) -> Any:
    """A variant's model before training."""
    kind, head = VARIANTS[name]
    if name == WIDE:
        missing = size_of(specheads.convert(base, "eagle3", **EAGLE3))
        missing -= size_of(specheads.convert(base, kind, **head))
        table = config_table(base.config)
        width = table["intermediate_size"] + missing // (3 * table["hidden_size"])  # gate, up and down
        head = {**head, "target_config": {**table, "intermediate_size": width}}
    return specheads.convert(base, kind, **head)


def size_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.head.parameters())


def train(name: str, seed: int, rows: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train a variant and save its head in `folder` → the time and memory that it took."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype).to(options.device)
    model = untrained(name, base).to(options.device)
    if isinstance(model.head, DraftVocabulary) and model.head.target_ids is not None:
        model.head.set_draft_vocabulary(token_counts(rows, len(model.head.t2d)), base)
    clock = Clock(torch.device(options.device))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = specheads.SpecTrainingArguments(
            output_dir=scratch, max_steps=options.steps, per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate, muon=True, lr_scheduler_type="linear", warmup_steps=0.03,
            max_grad_norm=1.0, adam_beta2=0.95, seed=seed, report_to=[], save_strategy="no", bf16=options.bf16,
            use_cpu=options.device == "cpu", disable_tqdm=True, logging_steps=50,
        )  # fmt: skip
        trainer = specheads.SpecTrainer(
            model, arguments, train_dataset=rows, data_collator=Collator(0), callbacks=[clock]
        )
        trainer.train()
    batch = Collator(0)([rows[i] for i in range(options.batch_size)])
    batch = {key: value.to(options.device) for key, value in batch.items()}
    tokens = options.batch_size * sum(len(row["input_ids"]) for row in rows) / len(rows)  # mean per step
    seconds = (clock.marks[-1] - clock.marks[0]) / (len(clock.marks) - 1)
    autocast = torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.bf16)
    with LiveMemory() as memory:
        with autocast:
            loss = model(**batch).loss
        loss.backward()
    model.save_pretrained(folder)
    return {"parameters": size_of(model), "tokens_per_second": tokens / seconds, "peak_mib": memory.peak / 2**20}


def decode(model: Any, shape: str, batches: list[dict[str, Any]], max_new_tokens: int) -> list[tuple[int, int]]:
    """For each prompt: the number of tokens after the first (which comes from the prefill), and their steps."""
    tree = BestFirstTree(NODES, DEPTH, 4) if model.head.config.kind == "parallel" else DynamicTree(NODES, DEPTH, 4)
    plan, sampling = {
        "greedy chain": (chain(DEPTH), {}),
        "greedy tree": (tree, {}),
        "sampled chain": (SampledTree((1,) * DEPTH), {"do_sample": True}),
        "sampled tree": (SampledTree((3, 2, 1)), {"do_sample": True}),
    }[shape]
    run = decoders.specheads_generate(model, max_new_tokens, plan=plan, **sampling)
    if sampling:  # each prompt has its own seed, the same for every head
        seeds = row_seeds(0, sum(len(batch["input_ids"]) for batch in batches))
        batches = [{**batch, "seeds": [seeds.pop(0) for _ in batch["input_ids"]]} for batch in batches]
    gains = [row[1:] for batch in batches for row in run(batch, None).gains]
    return [(sum(row), len(row)) for row in gains]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="checkpoints/base")
    parser.add_argument("--data", nargs="+", required=True, help="rows generated by the base itself")
    parser.add_argument("--out", type=Path, required=True, help="the folder for heads.md, heads.json and heads/")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="run only these")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="decode only with these")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (weights and row order)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=176)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--bf16", action="store_true", help="train under bfloat16 autocast, the base in bfloat16")
    parser.add_argument("--num-prompts", type=int, default=50, help="from each kind of source")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    hf_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    rows, _ = build_datasets(DataConfig(train=options.data, max_length=options.max_length), tokenizer)
    asked = prompts(tokenizer, options.num_prompts)
    batches = prompt_batches.batches(tokenizer, asked, torch.device(options.device), options.num_prompts)
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).to(options.device)
    folder, spent = options.out / "heads", budget(options) | marks(base, rows, asked)
    refuse_other_runs(folder, spent)
    for seed in range(options.seeds):
        for name in options.only:
            own = folder / f"{name.replace(', ', '_').replace(' ', '_').replace('+', 'p')}-{seed}"
            path = own / "figures.json"
            if not path.exists():
                own.mkdir(parents=True, exist_ok=True)
                cost = train(name, seed, rows, own, options)
                write(path, {"variant": name, "seed": seed, "budget": spent, **cost, "work": {}})
            record = json.loads(path.read_text("utf8"))
            for shape in options.shapes:
                if shape not in record["work"]:
                    model = specheads.load_head(base, own).eval()
                    record["work"][shape] = decode(model, shape, batches, options.max_new_tokens)
                    write(path, record)
                    length = float(accepted_length(torch.tensor(record["work"][shape]).double()))
                    print(f"{name}, seed {seed}, {shape}: {length:.3f} tokens a step", flush=True)
    show(folder, options, len(rows))
    return 0


def budget(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in BUDGET}


def show(folder: Path, options: argparse.Namespace, rows: int) -> None:
    """Write heads.md and heads.json, with the variants that have at least two seeds, as intervals require."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for path in sorted(folder.glob("*/figures.json")):
        record = json.loads(path.read_text("utf8"))
        if record["seed"] < options.seeds:
            found[record["variant"]].append(record)
    least = min(2, options.seeds)
    finished = {name: summary(records) for name, records in found.items() if len(records) >= least}
    unfinished = [f"{name} ({len(records)})" for name, records in found.items() if 0 < len(records) < least]
    if not finished:
        return
    reference = REFERENCE if REFERENCE in finished else next(iter(finished))
    for name, one in finished.items():
        one["difference"] = {
            shape: difference(found[name], found[reference], shape)
            for shape in one["accepted_length"]
            if name != reference and shape in finished[reference]["accepted_length"]
        }
    where, spent = environment.environment(), next(iter(finished.values()))["budget"]
    decoded = [shape for shape in SHAPES if any(shape in one["accepted_length"] for one in finished.values())]
    given = ["--data", *options.data, "--out", str(options.out), "--seeds", str(options.seeds)]
    given += ["--steps", str(spent["steps"]), *["--bf16"] * spent["bf16"]]
    for name in OPTIONAL:
        if (value := getattr(options, name)) != parser().get_default(name):
            given += [f"--{name.replace('_', '-')}", str(value)]
    given += ["--only", *finished, "--shapes", *decoded]
    command = f"python benchmarks/heads.py {shlex.join(given)}"
    text = "\n".join([
        "# Every head and every loss after the same training\n", f"`{command}`\n", f"{environment.line(where)}.\n",
        f"{spent['steps']} steps of {spent['batch_size']} rows of at most {spent['max_length']} "
        f"tokens, of {rows} that the base wrote itself, "
        + ("under bfloat16 autocast" if spent["bf16"] else "in float32")
        + f", learning rate {spent['learning_rate']:g} for all. Accepted length (tokens a step) in float32 on "
        f"{spent['num_prompts']} prompts of held-out files and {spent['num_prompts']} of installed packages × "
        f"{spent['max_new_tokens']} tokens, with 95 % intervals over seeds and prompts. Seeds are few, so "
        "these intervals are somewhat too narrow.\n",
        table(finished),
        *(["Not in the table, with the seeds done: " + ", ".join(unfinished) + ".\n"] if unfinished else []),
        *differences(finished, reference),
    ])  # fmt: skip
    record = {"command": command, "environment": where, "variants": list(finished.values())}
    report.write(options.out, "heads", text, record)
    print(text)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One variant's figures over its seeds."""
    shapes = [shape for shape in SHAPES if all(shape in record["work"] for record in records)]
    work = {shape: torch.tensor([r["work"][shape] for r in records]).double() for shape in shapes}
    mean = {key: sum(r[key] for r in records) / len(records) for key in ("tokens_per_second", "peak_mib")}
    return {
        **{key: records[0][key] for key in ("variant", "budget", "parameters")}, **mean,
        "seeds": [r["seed"] for r in records],
        "accepted_length": {shape: float(accepted_length(w)) for shape, w in work.items()},
        "interval": {shape: crossed_interval(w) for shape, w in work.items()},
        "by_seed": {shape: [float(accepted_length(one)) for one in w] for shape, w in work.items()},
    }  # fmt: skip


def difference(records: list[dict[str, Any]], reference: list[dict[str, Any]], shape: str) -> dict[str, Any]:
    """Accepted length minus the reference's, with its interval, over the seeds that both have and the same prompts."""
    own, other = ({r["seed"]: r["work"][shape] for r in each} for each in (records, reference))
    shared = sorted(own.keys() & other.keys())
    own, other = (torch.tensor([each[seed] for seed in shared]).double() for each in (own, other))
    return {
        "accepted_length": float(accepted_length(own) - accepted_length(other)),
        "interval": crossed_interval(own, other),
    }


def table(finished: dict[str, dict[str, Any]]) -> str:
    shapes = [shape for shape in SHAPES if any(shape in one["accepted_length"] for one in finished.values())]
    rows = [
        [
            one["variant"], f"{one['parameters'] / 1e6:.2f} M", str(len(one["seeds"])),
            *(shown(one["accepted_length"].get(shape), one["interval"].get(shape)) for shape in shapes),
            f"{one['tokens_per_second']:,.0f}", f"{one['peak_mib']:,.0f} MiB",
        ]
        for one in finished.values()
    ]  # fmt: skip
    return report.markdown(("head", "parameters", "seeds", *shapes, "training tokens/s", "peak memory"), rows)


def differences(finished: dict[str, dict[str, Any]], reference: str) -> list[str]:
    compared = {name: one["difference"] for name, one in finished.items() if one.get("difference")}
    if not compared:
        return []
    shapes = [shape for shape in SHAPES if any(shape in each for each in compared.values())]
    rows = [
        [name, *(shown(**each[shape], sign="+") if shape in each else "–" for shape in shapes)]
        for name, each in compared.items()
    ]
    text = f"Accepted length minus that of {reference}, of the same seeds and prompts:\n"
    return [text, report.markdown(("head", *shapes), rows)]


if __name__ == "__main__":
    sys.exit(main())
