"""A head's accepted length in tokens per step, greedy and sampled: the figures in the README of its exports.

    python benchmarks/accepted_length.py checkpoints/eagle3 checkpoints/eagle --tree chain:7 --record
    python benchmarks/accepted_length.py checkpoints/medusa --record

Float32, batch 1, prompts from held-out files; a tree is named as on the command line (default: the head's own).
--record writes the results into the head's results.json as `decoded`, replacing earlier ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging

from specheads import SpecModel
from specheads.bench.prompts import held_out_prompts
from specheads.bench.shipped import held_out_names
from specheads.decoding.generation import prompt_batches
from specheads.models.files import RESULTS, results


def mean_accepted_length(model: SpecModel, batches: Iterable[dict[str, Any]], **options: Any) -> float:
    """Mean tokens per step, without the prefill. options: of generate()."""
    yielded = []
    for batch in batches:
        out: Any = model.generate(**batch, draft="head", return_dict_in_generate=True, **options)
        yielded += [len(row) for step in out.steps[1:] for row in step.tokens if row]
    return sum(yielded) / len(yielded)


def decoded(
    model: SpecModel, batches: list[dict[str, Any]], temperature: float, tree: str | None, new_tokens: int
) -> dict[str, Any]:
    """One row: the settings and the tokens per step. Reproducible: sampling starts from seed 0."""
    torch.manual_seed(0)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )
    length = mean_accepted_length(model, batches, max_new_tokens=new_tokens, eos_token_id=None, tree=tree, **sampling)
    return {
        "temperature": temperature, "tree": tree or "its default tree", "prompts": len(batches),
        "new_tokens": new_tokens, "accepted_length": round(length, 2),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", type=Path, metavar="HEAD", help="a folder with a head for the shipped base")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--tree", help="tree to draft, such as chain:5")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--record", action="store_true", help="write the results into the head's results.json")
    given = parser.parse_args(arguments)
    for name in ("num_prompts", "max_new_tokens"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: expected at least 1")
    hf_logging.disable_progress_bar()
    for folder in given.heads:
        model: Any = SpecModel.from_pretrained(folder, dtype=torch.float32)
        base = Path(model.config.base_model_name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(base)
        prompts = held_out_prompts(tokenizer, given.num_prompts, held_out=held_out_names(base))
        batches = prompt_batches.batches(tokenizer, prompts, model.device)
        rows = [decoded(model, batches, t, given.tree, given.max_new_tokens) for t in given.temperatures]
        print(folder, *rows, sep="\n  ", flush=True)
        if given.record:
            record = {**results(folder), "decoded": rows}
            (folder / RESULTS).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", "utf8")


if __name__ == "__main__":
    main()
