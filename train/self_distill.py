"""Let the base model continue prompts itself, and keep what it wrote as training rows: heads learn best on the text
they will draft.

    python train/self_distill.py --base checkpoints/base --output runs/own.jsonl --num_rows 4000
    python train/self_distill.py --base my/model --source prompts.jsonl --output own.jsonl --temperature 1.0

Each line of the output is {"input_ids": […], "labels": […]}: the prompt and its continuation, as token ids, so that
nothing is lost by decoding and encoding again. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from specheads import corpus
from specheads.data import DataConfig, load_dataset_rows, tokenize


@dataclass
class Options:
    base: str = field(metadata={"help": "the base model, a path or hub id"})
    output: str = field(metadata={"help": "JSONL file to write, or to go on with"})
    source: str | None = field(default=None, metadata={"help": "text or chat rows (default: the standard library)"})
    split: corpus.Split = field(default="train", metadata={"help": "of the standard library: train or held_out"})
    num_rows: int = field(default=4000, metadata={"help": "rows in the finished file"})
    prompt_tokens: int = field(default=64, metadata={"help": "tokens of each prompt, cut from a random place"})
    max_new_tokens: int = 128
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    batch_size: int = 32
    dtype: str = field(default="auto", metadata={"help": "float32, bfloat16 or auto"})
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_rows", "prompt_tokens", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} {getattr(self, name)} must be at least 1")
        if self.split not in ("train", "held_out"):
            raise SystemExit(f"--split {self.split} must be train or held_out")
        if self.temperature < 0:
            raise SystemExit(f"--temperature {self.temperature} must be at least 0")


def documents(options: Options, tokenizer) -> list[list[int]]:
    """Token ids of every source row that is long enough for a prompt."""
    if options.source is None:
        encoded = (tokenizer(text)["input_ids"] for _, text in corpus.texts(options.split))
    else:
        config = DataConfig(train=options.source)
        encoded = (tokenize(row, tokenizer, config)["input_ids"] for row in load_dataset_rows(options.source))
    long_enough = [ids for ids in encoded if len(ids) >= options.prompt_tokens]
    if not long_enough:
        raise SystemExit(f"no row of {options.source} has {options.prompt_tokens} tokens; give a lower --prompt_tokens")
    return long_enough


def prompts(options: Options, rows: list[list[int]]) -> Iterator[list[int]]:
    """An endless, seeded stream of prompts; long documents are drawn from more often."""
    rng = random.Random(options.seed)
    weights = [len(row) for row in rows]
    while True:
        row = rng.choices(rows, weights)[0]
        start = rng.randrange(len(row) - options.prompt_tokens + 1)
        yield row[start : start + options.prompt_tokens]


def finished_rows(path: Path) -> int:
    """How many whole lines the file has; a line that was cut short is taken away."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("rb+") as file:
            file.truncate(whole)
    return content.count(b"\n")


def main() -> None:
    (options,) = HfArgumentParser([Options], description=__doc__).parse_args_into_dataclasses()  # type: ignore[list-item]
    dtype = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    base: Any = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype)
    base.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    torch.manual_seed(options.seed)
    out = Path(options.output)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = finished_rows(out)
    stream = prompts(options, documents(options, tokenizer))
    for _ in range(done):
        next(stream)
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    stop = base.generation_config.eos_token_id
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    with out.open("a", encoding="utf8") as file, tqdm(total=options.num_rows, initial=done, unit="row") as bar:
        while done < options.num_rows:
            batch = [next(stream) for _ in range(min(options.batch_size, options.num_rows - done))]
            ids = torch.tensor(batch, device=base.device)
            made = base.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id, **sampling,
            )  # fmt: skip
            for row in made.tolist():
                end = next((i + 1 for i in range(options.prompt_tokens, len(row)) if row[i] in stops), len(row))
                file.write(json.dumps({"input_ids": row[:end], "labels": row[:end]}) + "\n")
            file.flush()
            done += len(batch)
            bar.update(len(batch))


if __name__ == "__main__":
    main()
