"""The demo: gives a base an EAGLE-3 head, trains it live, saves it, restores it in a new process, and races it.

One run, in order: train_live() → save_pretrained() → show_elsewhere() → race.compare() → one table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.bench import environment, report, shipped
from specheads.bench.prompts import held_out_prompts
from specheads.cli import text
from specheads.cli.app import emit
from specheads.cli.demo import race
from specheads.cli.demo.live import LiveOptions, own_base, train_live
from specheads.cli.errors import refuse_file
from specheads.cli.options.training import DemoOptions
from specheads.decoding.generation import prompt_batches
from specheads.decoding.planner import chain
from specheads.models.convert import convert, load_head

DRAFT_VOCAB = 1024  # of the live head, so that its output matrix is a third of its weights, not two thirds
SEED = 0  # of the training
STEPS = 3  # of training-time test, of the live head
NUM_PROMPTS, NEW_TOKENS = 6, 48  # of the race: PROMPT and held-out files
NUM_WATCHED = 6  # other held-out files, which say when the training may end
PROMPT = '''class Stack:
    """A stack of items."""

    def __init__(self):
        self.items = []

    def push(self, item):
        """Add an item to the top of the stack."""
        self.items.append(item)

    def pop(self):'''


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
    torch.set_num_threads(1)  # the base is small: its threads only wait for one another, on a busy machine for minutes
    began = time.monotonic()
    hf_logging.disable_progress_bar()
    torch.manual_seed(SEED)
    folder = find_base(options, out)
    base, tokenizer = shipped.load_base(folder)
    held_out = shipped.held_out_names(folder)
    unseen = held_out_prompts(tokenizer, NUM_PROMPTS - 1 + NUM_WATCHED, held_out=held_out)
    prompts = [PROMPT, *unseen[NUM_WATCHED:]]
    (watched,) = prompt_batches.batches(tokenizer, unseen[:NUM_WATCHED], base.device, NUM_WATCHED)

    heading(out, "1  A frozen base model gets a draft head")
    draft_vocab = min(DRAFT_VOCAB, base.config.vocab_size)
    model = convert(base, "eagle3", steps=STEPS, draft_vocab_size=draft_vocab, tree=chain(4).choices)
    layers = ", ".join(map(str, model.head.layers))
    out.print(
        f"base: {type(model.base).__name__}, {model.base.num_parameters() / 1e6:.1f}M parameters, frozen\n"
        f"head: EAGLE-3 on layers {layers}, {sum(p.numel() for p in model.head.parameters()) / 1e6:.1f}M parameters, "
        "started from the base's output matrix"
    )

    live = LiveOptions(options.minutes, SEED)
    heading(out, f"2  Training until {live.enough:g} tokens a pass, for {options.minutes:g} minutes at most")
    trained = train_live(model, tokenizer, held_out, watched, live, out)
    model.save_pretrained(options.output)
    del model
    size = sum(p.stat().st_size for p in options.output.iterdir()) / 1e6
    out.print(f"saved {options.output} ({size:.1f} MB: the head alone)")

    heading(out, "3  Restored in a new process, drafting for text it has never seen")
    restored = show_elsewhere(options.output, folder, PROMPT, out)

    heading(out, f"4  The same {len(prompts)} prompts through every decoder")
    models = {"head": load_head(base, options.output, dtype=base.dtype)}
    if (folder.parent / "eagle3" / "config.json").is_file():
        models["head, shipped"] = load_head(base, folder.parent / "eagle3", dtype=base.dtype)
    batches = prompt_batches.batches(tokenizer, prompts, base.device)
    result = race.compare(base, models, batches, NEW_TOKENS, out)
    rows, where = report.summary(result, race.PLAIN), environment.environment()
    race.print_figures(rows, where, NEW_TOKENS, out)
    differing, ties = race.differences(result, base, batches, restored)
    race.tell_differences(differing, ties, result, out)

    seconds = time.monotonic() - began
    out.print(f"{seconds // 60:.0f} min {seconds % 60:.0f} s in all")
    out.print(f'more: specheads generate {options.output} --prompt "import os" --live')
    return {
        "decoders": rows, "environment": where, "training": trained, "same_text": not differing and not ties,
        "differing": differing, "near_ties": ties, "num_prompts": len(result.runs["head"][0]),
        "max_new_tokens": NEW_TOKENS, "seconds": seconds,
    }  # fmt: skip


def show_elsewhere(head: Path, base: Path, prompt: str, out: Console) -> list[int]:
    """Let `specheads generate`, in a new process, load the saved head, and print its text, coloured by draft depth.
    Returns the text's ids."""
    words = f"--draft head --max-new-tokens {NEW_TOKENS} --dtype float32 --json".split()
    words = [str(head), "--base", str(base), "--prompt", prompt, *words]
    command = [sys.executable, "-m", "specheads", "generate", *words]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if process.returncode:
        raise ValueError(f"the new process could not restore {head} (exit code {process.returncode})")
    record = json.loads(process.stdout)
    if terminal.has_colors(out):
        out.print(text.legend())
    ids, depths = record["token_ids"], record["draft_depths"]
    stream = text.TokenStream(out, AutoTokenizer.from_pretrained(base), colored=True, prompt=prompt)
    for token, depth in zip(ids, depths, strict=True):
        stream.show(token, depth, last=len(stream.depths) == len(ids) - 1)
    passes = 1 + record["statistics"]["steps"]
    out.print(f"\n── {len(ids)} tokens: {len(ids)} passes → {passes}; {text.depth_counts(depths)}", style="italic")
    return ids


def find_base(options: DemoOptions, out: Console) -> Path:
    """The folder of the base. A wheel has none: then a base is trained."""
    try:
        return shipped.find_base(options.checkpoints)
    except FileNotFoundError:
        if options.checkpoints is not None:
            raise
    heading(out, "0  No base model came with the package: a tiny one learns the standard library, in a few minutes")
    return own_base(options.output.with_name(f"{options.output.name}-base") / "base", SEED, out)


def heading(out: Console, text: str) -> None:
    out.print(f"\n{text}", style="bold")
