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
its decay by depth and initial weights are each program's own. "specheads anchored" makes the drafts behind the first
at one position in eight; "normed" is norm_before_residual, which ModelOpt has not. The trained heads are read here by
`specheads import` and decode held-out prompts through the same loop. A second base of random weights with --wide-vocab
tokens shows speed and memory at a vocabulary of today's size. Speed is tokens a second of CPU time, median of the
steps, the base's forward included; memory is the peak of one step beyond all weights, counted tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from specheads import SpecModel, chain
from specheads.bench import decoders, environment, memory, report
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


def trained(side: str, head: str, base: str, given: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    program, _, variant = side.partition(" ")
    python = {"specheads": sys.executable, "modelopt": options.modelopt, "speculators": options.speculators}[program]
    out.mkdir(parents=True)
    job = {
        "side": program, "head": head, "base": base, "batches": str(given), "out": str(out), "depth": DEPTHS[head],
        "draft_vocab_size": options.draft_vocab_size, "learning_rate": options.learning_rate, "seed": options.seed,
        "threads": 1, "compile": variant == "compiled", "memory": memory.__file__, "normed": "normed" in variant,
        "anchors": options.max_length // 8 if "anchored" in variant else None,
    }  # fmt: skip
    path = out / "job.json"
    path.write_text(json.dumps(job))
    subprocess.run([python, str(HERE / "peer_sides.py"), str(path)], check=True)
    found: dict[str, Any] = json.loads((out / "figures.json").read_text())
    return found


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
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--wide-steps", type=int, default=12)
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
    left_out = {name for name in ("modelopt", "speculators") if not getattr(options, name)}
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
            for head, sides in SIDES.items():
                for side in sides:
                    if side in left_out:
                        continue
                    out = work / f"{vocab_size}-{head}-{side.replace(' ', '-')}"
                    figures = trained(side, head, base, given, out, options)
                    if base == options.base:
                        figures["accepted_length"] = accepted_length(out, options, DEPTHS[head])
                    records.append({"head": head, "vocab_size": vocab_size, "side": side, **figures})
                    print(json.dumps(records[-1]), flush=True)
    show(records, options)
    return 0


def show(records: list[dict[str, Any]], options: argparse.Namespace) -> None:
    ours = {(r["head"], r["vocab_size"], r["side"]): r for r in records if r["side"].startswith("specheads")}

    def by_theirs(r: dict[str, Any], figure: str, mark: str) -> str:
        """Of one of ours, and of the anchored one where there is one."""
        if r["side"].startswith("specheads"):
            return ""
        alike = "specheads normed" if "normed" in r["side"] else "specheads"
        own = [ours.get((r["head"], r["vocab_size"], side)) for side in (alike, f"{alike} anchored")]
        return ", ".join(f"{one[figure] / r[figure]:.2f}{mark}" for one in own if one)

    table = [
        [
            f"{r['head']}, V = {r['vocab_size']:,}", r["side"], f"{r['parameters'] / 1e6:.2f} M",
            f"{r['tokens_per_second']:,.0f}", by_theirs(r, "tokens_per_second", "×"),
            f"{r['step_mib']:,.0f} MiB", by_theirs(r, "step_mib", ""),
            f"{r['accepted_length']:.2f}" if "accepted_length" in r else "",
        ]
        for r in records
    ]  # fmt: skip
    versions = sorted({f"{name} {number}" for r in records for name, number in r["versions"].items()})
    command = (
        "python benchmarks/peers.py --modelopt mo/bin/python --speculators spec/bin/python "
        f"--data {' '.join(options.data)} --out {options.out} --steps {options.steps}"
        + (" --compiled" if options.compiled else "")
    )  # fmt: skip
    text = "\n".join([
        "# Training the same heads with ModelOpt and with speculators\n", f"`{command}`\n",
        f"{environment.line(environment.environment())}; {', '.join(versions)}. One thread, float32.\n",
        f"{options.steps} steps of {options.batch_size} × {options.max_length} tokens ({options.wide_steps} where the "
        f"vocabulary is a wide one of random weights), AdamW at {options.learning_rate:g}; {DEPTHS['eagle3']} steps of "
        f"training-time test over a draft vocabulary of {options.draft_vocab_size:,}, and {DEPTHS['medusa']} Medusa "
        "heads over all tokens. Speed is of CPU time with the base's forward in it; memory is the peak of one step "
        "beyond all weights. “Ours by theirs” is of specheads and, behind the comma, anchored: above 1 for speed and "
        "below 1 for memory is in our favour; normed with normed. The wide base's random tokens are mostly outside the "
        "draft vocabulary, which saves nobody work. Accepted "
        f"length: tokens a step of greedy chains on {options.num_prompts} held-out prompts × 64 tokens.\n",
        report.markdown(
            ("head", "program", "trained", "tokens/s", "ours by theirs", "peak memory", "ours by theirs",
             "accepted length"), table,
        ),
    ])  # fmt: skip
    report.write(options.out, "peers", text, {"command": command, "sides": records})
    print(text)


if __name__ == "__main__":
    sys.exit(main())
