"""The demo: gives a base an EAGLE-3 head, trains it live, saves it, restores it in a new process, and races it.

One run, in order: train_live() → save_pretrained() → show_elsewhere() → compare() → one table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.bench import decoders, environment, report, runner, shipped
from specheads.bench.decoders import REFERENCE
from specheads.bench.prompts import held_out_prompts
from specheads.cli import text
from specheads.cli.app import emit
from specheads.cli.demo.live import LiveOptions, own_base, train_live
from specheads.cli.errors import refuse_file
from specheads.cli.options.training import DemoOptions
from specheads.decoding.generation import prompt_batches
from specheads.decoding.planner import chain
from specheads.models.convert import convert, load_head
from specheads.models.spec_model import SpecModel

LIVE = "EAGLE-3, just trained"
DRAFT_VOCAB = 1024  # of the live head, so that its output matrix is a third of its weights, not two thirds
SEED = 0  # of the training
STEPS = 3  # of training-time test, of the live head
NUM_PROMPTS, NEW_TOKENS = 6, 96  # of the race, from held-out files
REPEATS = 3  # of the race
RACE_SECONDS = 130.0  # budget of the race, beyond which no further repeat starts
TIE = 1e-3  # logits closer than this may swap ranks between two float32 passes of different shape


def run(options: DemoOptions) -> int:
    """The exit code is 1 if a text differs."""
    refuse_file(options.output, "--output")
    figures = tell(options, terminal.make_console(stderr=options.as_json))  # with --json all else goes to stderr
    if options.as_json:
        emit(figures)
    return int(bool(figures["differing"]))


def tell(options: DemoOptions, out: Console) -> dict[str, Any]:
    """Run the demo, printing on `out`, and return its figures. `differing` lists texts that differ: should be empty.

    ValueError or OSError on bad input."""
    began = time.monotonic()
    hf_logging.disable_progress_bar()
    torch.manual_seed(SEED)
    folder, raced = find_base(options, out)
    base, tokenizer = shipped.load_base(folder)
    held_out = shipped.held_out_names(folder)
    prompts = held_out_prompts(tokenizer, NUM_PROMPTS, held_out=held_out)

    heading(out, "1  A frozen base model gets a draft head")
    draft_vocab = min(DRAFT_VOCAB, base.config.vocab_size)
    model = convert(base, "eagle3", steps=STEPS, draft_vocab_size=draft_vocab, tree=chain(4).choices)
    layers = ", ".join(map(str, model.head.layers))
    out.print(
        f"base: {type(model.base).__name__}, {model.base.num_parameters() / 1e6:.1f}M parameters, frozen\n"
        f"head: EAGLE-3 on layers {layers}, {sum(p.numel() for p in model.head.parameters()) / 1e6:.1f}M parameters, "
        "started from the base's output matrix"
    )

    heading(out, f"2  {options.minutes:g} minutes of training on the standard library's source")
    trained = train_live(model, tokenizer, held_out, LiveOptions(options.minutes, SEED), out)
    model.save_pretrained(options.output)
    del model
    size = sum(p.stat().st_size for p in options.output.iterdir()) / 1e6
    out.print(f"saved {options.output} ({size:.1f} MB: the head alone)")

    heading(out, "3  Restored in a new process, drafting for text it has never seen")
    restored = show_elsewhere(options.output, folder, prompts[0], out)

    heading(out, f"4  The same {len(prompts)} prompts through every decoder")
    models = shipped.load_heads(base, folder.parent, raced, missing=out.print)
    models[LIVE] = load_head(base, options.output, dtype=base.dtype)
    batches = prompt_batches.batches(tokenizer, prompts, base.device)
    race = compare(base, models, batches, NEW_TOKENS, out)
    rows, where = report.summary(race, REFERENCE), environment.environment()
    num_raced = len(race.runs[LIVE][0])
    title = f"{num_raced} prompts × {NEW_TOKENS} tokens, greedy, median of {len(race.runs[LIVE])}"
    cells = [report.cells(name, row) for name, row in rows.items()]
    terminal.print_table(out, terminal.table(title, report.COLUMNS, cells))
    out.print(environment.line(where))
    differing, ties = differences(race, base, batches, restored)
    tell_differences(differing, ties, race, out)

    seconds = time.monotonic() - began
    out.print(f"{seconds // 60:.0f} min {seconds % 60:.0f} s in all")
    out.print(f'more: specheads generate {options.output} --prompt "import os" --color-depth')
    return {
        "decoders": rows, "environment": where, "training": trained, "same_text": not differing and not ties,
        "differing": differing, "near_ties": ties, "num_prompts": num_raced,
        "max_new_tokens": NEW_TOKENS, "seconds": seconds,
    }  # fmt: skip


def show_elsewhere(head: Path, base: Path, prompt: str, out: Console) -> list[int]:
    """Let `specheads generate`, in a new process, load the saved head, and print its text, coloured by draft depth.
    Returns the text's ids."""
    words = (
        "--base",
        base,
        "--draft",
        "head",
        "--prompt",
        prompt,
        "--max-new-tokens",
        NEW_TOKENS,
        "--dtype",
        "float32",
    )
    command = [sys.executable, "-m", "specheads", "generate", str(head), *map(str, words), "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if process.returncode:
        raise ValueError(f"the new process could not restore {head} (exit code {process.returncode})")
    record = json.loads(process.stdout)
    if terminal.has_colors(out):
        out.print(text.legend())
    ids, depths = record["token_ids"], record["draft_depths"]
    stream = text.TokenStream(out, AutoTokenizer.from_pretrained(base), colored=True, prompt=prompt)
    for token, depth in zip(ids, depths, strict=True):
        stream.show(token, depth, last=len(stream.depths) == len(ids) - 1)
    speed = record["statistics"]["tokens_per_second"]
    out.print(f"\n── {text.depth_counts(depths)}; {speed:.0f} tokens/s", style="italic")
    return ids


def find_base(options: DemoOptions, out: Console) -> tuple[Path, Iterable[str]]:
    """The folder of the base, and the names of the heads beside it. A wheel has neither: then a base is trained."""
    try:
        return shipped.find_base(options.checkpoints), shipped.LABELS
    except FileNotFoundError:
        if options.checkpoints is not None:
            raise
    heading(
        out, "0  No base model came with the package: a tiny one is trained on the standard library, in a minute or two"
    )
    return own_base(options.output.with_name(f"{options.output.name}-base") / "base", SEED, out), ()


def heading(out: Console, text: str) -> None:
    out.print(f"\n{text}", style="bold")


def compare(
    base: PreTrainedModel, models: dict[str, SpecModel], batches: list[dict[str, Tensor]], max_new_tokens: int,
    out: Console,
) -> runner.Race:  # fmt: skip
    """Race transformers' generate(), our loop without drafts, and every head on the same prompts."""
    racers = {
        REFERENCE: decoders.transformers_generate(base, max_new_tokens),
        "our loop, no drafts": decoders.specheads_generate(base, max_new_tokens),
        **{name: decoders.specheads_generate(model, max_new_tokens) for name, model in models.items()},
    }
    with terminal.progress(out, "racing") as tell:
        return runner.race(racers, batches, repeats=REPEATS, budget=RACE_SECONDS, report=tell)


@torch.no_grad()
def differences(
    race: runner.Race, base: PreTrainedModel, batches: list[dict[str, Tensor]], restored: list[int]
) -> tuple[list[str], list[str]]:
    """Where texts differ from transformers' own; and, separately, near ties, where the two likeliest tokens are so
    close that rounding in a pass of another shape may decide between them.

    restored: the first text, as generated with the restored head.
    """
    differing: list[str] = []
    ties: list[str] = []
    for name in race.runs:
        for i, row, at in race.differing(name, REFERENCE):
            tokens = race.runs[REFERENCE][0][i].output.tokens[row][:at]
            ids = torch.cat([batches[i]["input_ids"][row], torch.tensor(tokens, device=base.device, dtype=torch.long)])
            best = base(input_ids=ids.unsqueeze(0)).logits[0, -1].topk(2).values
            margin = float(best[0] - best[1])
            where = f"{name} on prompt {i + 1} from token {at + 1} on (the best two are {margin:.2g} apart)"
            (differing if margin > TIE else ties).append(where)
    if race.runs[LIVE][0][0].output.tokens[0] != restored:
        differing.append("the restored process wrote another text than the head does here")
    return differing, ties


def tell_differences(differing: list[str], ties: list[str], race: runner.Race, out: Console) -> None:
    """Print the verdict in one line."""
    runs = race.runs[REFERENCE][0]
    size = (
        f"{len(race.runs)} decoders × {len(runs)} prompts, {sum(r.num_tokens for r in runs)} tokens each, "
        "and the restored process"
    )
    if differing:
        out.print("✗ not every text is the same: " + "; ".join(differing + ties), style="bold red")
    elif ties:
        out.print(f"≈ every text is the same ({size}) but for near ties: " + "; ".join(ties), style="bold yellow")
    else:
        out.print(f"✓ every text is the same: {size}", style="bold green")
