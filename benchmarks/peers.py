"""Training against NVIDIA ModelOpt and speculators: tokens a second, memory, and what the heads then yield.

Each peer needs an environment of its own, made once:

    python -m venv mo && mo/bin/pip install torch==2.13.0
    mo/bin/pip install nvidia-modelopt==0.47.0 transformers==5.16.1 accelerate peft datasets requests
    python -m venv spec && spec/bin/pip install torch==2.13.0
    spec/bin/pip install speculators==0.9.0 torch==2.13.0 transformers==5.19.0
    mo/bin/pip uninstall -y torchvision torchaudio torchcodec
    spec/bin/pip uninstall -y torchvision torchaudio torchcodec

and the rows come from the base itself:

    python train/self_distill.py --base checkpoints/base --output runs/own.jsonl --num_rows 864 --batch_size 96 \\
        --max_new_tokens 112 --dtype float32
    python benchmarks/peers.py --modelopt mo/bin/python --speculators spec/bin/python --data runs/own.jsonl \\
        --out docs/benchmarks

All sides: the same base, head size, draft vocabulary, batches, steps, AdamW and schedule, float32, one thread; loss,
its decay by depth and initial weights are each program's own. "specheads anchored" makes the drafts after the first
at one position in eight, which is less work: rows of its own. "normed" is norm_before_residual, which ModelOpt has not;
"modelopt mixed" is its eagle_mix_hidden_states, "compiled" its eagle_use_torch_compile. The trained heads are read here
by `specheads import` and decode held-out prompts through the same loop (not with --num-prompts 0). A second base of
random weights with --wide-vocab tokens shows speed and memory at a vocabulary of today's size.

All sides of a head are in memory at once and take turns, a block of steps each, in an order that rotates. Speed is
tokens a second of CPU time, the base's forward included, over all blocks but the first; the interval of a ratio is a
bootstrap over blocks. The floor is the time that a step's matrix products take at the rate of the commonest of them,
measured before each block by each side. Memory is the peak of one step beyond all weights, counted tensor by tensor (of
compiled code as if it were not), and beside it by how much training raised the peak of the process's resident memory.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from specheads import SpecModel, chain
from specheads.bench import decoders, environment, memory, report
from specheads.bench.figures.intervals import ratio_interval, speed
from specheads.bench.prompts import held_out_prompts
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets, token_counts
from specheads.decoding.generation import prompt_batches

HERE = Path(__file__).resolve().parent
DEPTHS = {"eagle3": 4, "medusa": 4}
SIDES = {
    "eagle3": (
        "specheads",
        "specheads anchored",
        "modelopt",
        "modelopt mixed",
        "modelopt compiled",
        "speculators",
        "specheads normed",
        "specheads normed anchored",
        "speculators normed",
    ),
    "medusa": ("specheads", "specheads anchored", "modelopt"),
}


def batches(data: list[str], tokenizer: Any, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """ids (steps, B, T) of whole rows, and how often each token occurs in the data (V,)."""
    rows, _ = build_datasets(DataConfig(train=data, max_length=options.max_length), tokenizer)
    whole = [row["input_ids"] for row in rows if len(row["input_ids"]) == options.max_length]
    wanted = options.steps * options.batch_size
    if len(whole) < options.batch_size:
        raise SystemExit(
            f"{len(whole)} of {len(rows)} rows have {options.max_length} tokens, and a batch takes "
            f"{options.batch_size}: give other rows, or a lower --max-length"
        )
    chosen = torch.tensor([list(whole[i % len(whole)]) for i in range(wanted)])
    return chosen.view(options.steps, options.batch_size, -1), token_counts(rows, len(tokenizer))


def wide_base(folder: Path, source: str, vocab_size: int) -> None:
    """A base of the same layers with random weights and another vocabulary: for speed and memory, not for its text."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(source)
    config.vocab_size = vocab_size
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


class Side:
    """One program training one head, in a process that waits for its turn."""

    def __init__(self, side: str, head: str, base: str, given: Path, out: Path, options: argparse.Namespace) -> None:
        program, _, variant = side.partition(" ")
        python = {"specheads": sys.executable, "modelopt": options.modelopt, "speculators": options.speculators}
        out.mkdir(parents=True)
        self.name, self.out = side, out
        self.blocks: list[list[float]] = []  # CPU seconds of each step
        self.rates: list[float] = []  # of matrix products, before each block
        self.answer = out / "seconds.json"
        job = {
            "side": program, "head": head, "base": base, "batches": str(given), "out": str(out), "depth": DEPTHS[head],
            "draft_vocab_size": options.draft_vocab_size, "learning_rate": options.learning_rate, "seed": options.seed,
            "threads": 1, "compile": variant == "compiled", "mixed": variant == "mixed", "memory": memory.__file__,
            "normed": "normed" in variant, "anchors": options.max_length // 8 if "anchored" in variant else None,
            "answer": str(self.answer),
        }  # fmt: skip
        (out / "job.json").write_text(json.dumps(job))
        command = [python[program], str(HERE / "peer_sides.py"), str(out / "job.json")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def take(self, steps: int) -> None:
        """Train on the next steps, and note the CPU seconds of each and the machine's rate."""
        assert self.process.stdin
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        while not self.answer.exists():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with exit code {self.process.returncode}; see its error above")
            time.sleep(0.05)
        found = json.loads(self.answer.read_text())
        self.blocks.append(found["seconds"])
        self.rates.append(found["product_rate"])
        self.answer.unlink()

    def finish(self) -> dict[str, Any]:
        self.process.communicate()
        if self.process.returncode:
            raise SystemExit(f"{self.name} ended with exit code {self.process.returncode}; see its error above")
        found: dict[str, Any] = json.loads((self.out / "figures.json").read_text())
        return found | {"block_seconds": self.blocks, "product_rates": self.rates}


def trained(sides: list[Side], steps: int, block: int, tokens: int) -> list[dict[str, Any]]:
    """Each side's figures, after its steps in blocks that take turns. tokens: of a step."""
    for turn, begun in enumerate(range(0, steps, block)):
        for i in range(len(sides)):
            sides[(turn + i) % len(sides)].take(min(block, steps - begun))
    rate = statistics.median(rate for side in sides for rate in side.rates[1:])  # they share the machine
    records = []
    for side in sides:
        figures = side.finish()
        # The first block is the warm-up. Of the others the median step: the machine may have other work.
        work = [(tokens, statistics.median(seconds)) for seconds in side.blocks[1:]]
        floor = tokens / speed(work) / (figures["step_flops"] / rate)
        records.append({"side": side.name, **figures, "work": work, "tokens_per_second": speed(work), "floor": floor})
    return records


def accepted_length(folder: Path, options: argparse.Namespace, depth: int) -> float:
    """Tokens a step of greedy chains on held-out prompts."""
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    model = SpecModel.from_pretrained(folder, base=base).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    prompts = prompt_batches.batches(tokenizer, held_out_prompts(tokenizer, options.num_prompts), model.device)
    return decoders.accepted_length(model, prompts, max_new_tokens=64, do_sample=False, tree=chain(depth))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modelopt", help="a Python with nvidia-modelopt; without it, that side is left out")
    parser.add_argument("--speculators", help="a Python with speculators; without it, that side is left out")
    parser.add_argument("--base", default="checkpoints/base")
    parser.add_argument("--data", nargs="+", required=True, help="rows the base wrote itself")
    parser.add_argument("--out", type=Path, required=True, help="the folder for peers.md and peers.json")
    parser.add_argument("--compiled", action="store_true", help="ModelOpt with its torch.compile too")
    parser.add_argument("--sides", nargs="+", help="these alone, as the table names them")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--block", type=int, default=10, help="steps of a turn; the first block is a warm-up")
    parser.add_argument("--wide-steps", type=int, default=12)
    parser.add_argument("--wide-block", type=int, default=2)
    parser.add_argument("--heads", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--wide-vocab", type=int, nargs="*", default=[32768])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=176)
    parser.add_argument("--draft-vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    hf_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    ids, counts = batches(options.data, tokenizer, options)
    programs = ("modelopt", "speculators")
    without = [name for name in programs if not getattr(options, name)]
    left_out = {side for sides in SIDES.values() for side in sides if side.partition(" ")[0] in without}
    left_out |= {side for side in SIDES["eagle3"] if "normed" in side and "speculators" in without}
    left_out |= {side for sides in SIDES.values() for side in sides if options.sides and side not in options.sides}
    left_out |= set() if options.compiled else {"modelopt compiled"}
    records = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        shapes = [(options.base, len(counts), ids)]
        for vocab_size in options.wide_vocab:
            wide_base(work / f"base{vocab_size}", options.base, vocab_size)
            some = torch.randint(vocab_size, (options.wide_steps, *ids.shape[1:]), generator=torch.manual_seed(1))
            shapes.append((str(work / f"base{vocab_size}"), vocab_size, some))
        for base, vocab_size, seen in shapes:
            given = work / f"batches{vocab_size}.safetensors"
            padded = torch.nn.functional.pad(counts, (0, vocab_size - len(counts)))
            save_file({"ids": seen.contiguous(), "counts": padded}, given)
            block = options.block if base == options.base else options.wide_block
            for head in options.heads:
                names = [side for side in SIDES[head] if side not in left_out]
                folders = [work / f"{vocab_size}-{head}-{side.replace(' ', '-')}" for side in names]
                sides = [Side(side, head, base, given, out, options) for side, out in zip(names, folders, strict=True)]
                for out, figures in zip(folders, trained(sides, len(seen), block, seen[0].numel()), strict=True):
                    if base == options.base and options.num_prompts:
                        figures["accepted_length"] = accepted_length(out, options, DEPTHS[head])
                    records.append({"head": head, "vocab_size": vocab_size, **figures})
                    print(json.dumps(records[-1]), flush=True)
    show(records, options)
    return 0


def show(records: list[dict[str, Any]], options: argparse.Namespace) -> None:
    ours = {(r["head"], r["vocab_size"], r["side"]): r for r in records if r["side"].startswith("specheads")}

    def by_theirs(r: dict[str, Any], figure: str) -> str:
        """Of one of ours, and of the anchored one where there is one."""
        if r["side"].startswith("specheads"):
            return ""
        alike = "specheads normed" if "normed" in r["side"] else "specheads"
        own = [ours.get((r["head"], r["vocab_size"], side)) for side in (alike, f"{alike} anchored")]
        return ", ".join(ratio(one, r, figure) for one in own if one)

    def ratio(one: dict[str, Any], r: dict[str, Any], figure: str) -> str:
        value = f"{one[figure] / r[figure]:.2f}"
        if figure != "tokens_per_second":
            return value
        interval = ratio_interval(one["work"], r["work"])
        return f"{value}×" + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")

    table = [
        [
            f"{r['head']}, V = {r['vocab_size']:,}", r["side"], f"{r['parameters'] / 1e6:.2f} M",
            f"{r['tokens_per_second']:,.0f}", by_theirs(r, "tokens_per_second"), f"{r['floor']:.2f}",
            f"{r['step_mib']:,.0f} MiB", by_theirs(r, "step_mib"), f"{r['resident_mib']:,.0f} MiB",
            f"{r['accepted_length']:.2f}" if "accepted_length" in r else "",
        ]
        for r in records
    ]  # fmt: skip
    versions = sorted({f"{name} {number}" for r in records for name, number in r["versions"].items()})
    environments = {options.modelopt: "mo/bin/python", options.speculators: "spec/bin/python"}  # as in the docstring
    command = "python benchmarks/peers.py " + shlex.join(environments.get(word, word) for word in sys.argv[1:])
    lengths = (
        f" Accepted length: tokens a step of greedy chains on {options.num_prompts} held-out prompts × 64 tokens."
        if options.num_prompts
        else ""
    )
    wide = (
        f" ({options.wide_steps} in blocks of {options.wide_block} where the vocabulary is a wide one of random "
        "weights, whose random tokens are mostly outside the draft vocabulary, which saves nobody work)"
        if options.wide_vocab
        else ""
    )
    text = "\n".join([
        "# Training the same heads with ModelOpt and with speculators\n", f"`{command}`\n",
        f"{environment.line(environment.environment())}; {', '.join(versions)}. One thread, float32.\n",
        f"{options.steps} steps of {options.batch_size} × {options.max_length} tokens in blocks of {options.block} "
        f"that take turns{wide}, AdamW at {options.learning_rate:g}; {DEPTHS['eagle3']} steps of "
        f"training-time test over a draft vocabulary of {options.draft_vocab_size:,}, and {DEPTHS['medusa']} Medusa "
        "heads over all tokens. Speed is of CPU time with the base's forward in it, its ratio with a 95 % interval "
        "over blocks; the floor is the time of its matrix products alone; memory is the peak of one step beyond all "
        "weights, resident what training added to the peak of "
        "the process. “Ours by theirs” is of specheads and, behind the comma, anchored, which is less work: above 1 "
        f"for speed and below 1 for memory is in our favour; normed with normed.{lengths}\n",
        report.markdown(
            ("head", "program", "trained", "tokens/s", "ours by theirs", "of the floor", "peak memory",
             "ours by theirs", "resident", "accepted length"), table,
        ),
    ])  # fmt: skip
    report.write(options.out, "peers", text, {"command": command, "sides": records})
    print(text)


if __name__ == "__main__":
    sys.exit(main())
