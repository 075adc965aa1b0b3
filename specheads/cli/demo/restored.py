"""Loads a saved head and its base in a new Python process, which prints the texts and returns their tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.bench.shipped import load_base
from specheads.cli.text import depth_counts, legend, write_text
from specheads.decoding.generation import prompt_batches
from specheads.models.convert import load_head


def show_elsewhere(head: Path, base: Path, prompts: list[str], max_new_tokens: int, out: Console) -> list[list[int]]:
    """Load the saved head in a new Python process, which prints the texts. Returns their token ids."""
    with tempfile.TemporaryDirectory() as scratch:
        task, answer = Path(scratch) / "task.json", Path(scratch) / "answer.json"
        record = {"head": str(head), "base": str(base), "prompts": prompts, "max_new_tokens": max_new_tokens}
        task.write_text(json.dumps(record), "utf8")
        out.file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "specheads.cli.demo.restored", str(task), str(answer)],
            stdout=_stream(out),
            check=False,
        )
        if done.returncode:
            raise ValueError(f"the new process could not restore {head} (exit code {done.returncode})")
        return json.loads(answer.read_text("utf8"))


def _stream(out: Console) -> Any:
    """The console's file if a subprocess can write to it, else DEVNULL: a captured stream has no file descriptor."""
    try:
        out.file.fileno()
    except (OSError, ValueError):
        return subprocess.DEVNULL
    return out.file


def show(head: str, base: str, prompts: list[str], max_new_tokens: int) -> list[list[int]]:
    """Load a head and stream its text after each prompt, coloured by draft depth. Returns the token ids."""
    hf_logging.disable_progress_bar()
    out = terminal.make_console()
    loaded, tokenizer = load_base(Path(base))
    model = load_head(loaded, head, dtype=loaded.dtype)
    if terminal.has_colors(out):
        out.print(legend())
    texts = []
    for prompt, batch in zip(prompts, prompt_batches.batches(tokenizer, prompts, loaded.device), strict=True):
        out.print()
        result, depths = write_text(
            out, loaded, tokenizer, prompt, batch, color_depth=True,
            draft=model.head, max_new_tokens=max_new_tokens, do_sample=False,
        )  # fmt: skip
        speed = result.statistics()["tokens_per_second"]
        out.print(f"\n── {depth_counts(depths)}; {speed:.0f} tokens/s", style="italic")
        texts += prompt_batches.new_tokens(loaded, batch, result.sequences)
    return texts


if __name__ == "__main__":
    task, answer = (Path(path) for path in sys.argv[1:])
    answer.write_text(json.dumps(show(**json.loads(task.read_text("utf8")))), "utf8")
