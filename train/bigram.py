"""Count the bigram table that MaG falls back on: for each token of a vocabulary, the token that follows it most often.

    python train/bigram.py --base checkpoints/base --output runs/bigram.json
    python train/bigram.py --base my/model --source corpus.txt --output bigram.json
    python train/bigram.py --base my/model --source 'shards/*.parquet' --text_column body --output bigram.json

The output is a JSON list: index = token id, value = next id, 0 = unknown. Use it as
    MaxGram(bigrams=load_bigrams("bigram.json", base.config.vocab_size))
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.cli.errors import listen, refuse_folder
from specheads.cli.script import options_from, run_script


@dataclass
class Options:
    base: str = field(metadata={"help": "model to draft for, a path or hub id: only its tokenizer and config are read"})
    output: str = field(metadata={"help": "JSON file to write"})
    source: str | None = field(
        default=None, metadata={"help": "text, JSONL or Parquet files, a glob or a hub id (default: standard library)"}
    )
    split: str = field(default="train", metadata={"help": "split of the source"})
    text_column: str = field(default="text", metadata={"help": "column of the source with text"})
    messages_column: str = field(default="messages", metadata={"help": "column of the source with chat messages"})


def token_rows(options: Options, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of every row of the source."""
    from specheads.data import corpus
    from specheads.data.config import DataConfig
    from specheads.data.rows import tokenize
    from specheads.data.sources import load_dataset_rows

    if options.source is None:
        if options.split not in ("train", "held_out"):
            raise ValueError(f"--split {options.split}: of the standard library it is train or held_out")
        for _, document in corpus.texts("train" if options.split == "train" else "held_out"):
            yield tokenizer(document, verbose=False)["input_ids"]
        return
    text, messages = options.text_column, options.messages_column
    config = DataConfig(train=options.source, text_column=text, messages_column=messages, max_length=sys.maxsize)
    for row in load_dataset_rows(options.source, options.split, text_column=text, messages_column=messages):
        yield tokenize(row, tokenizer, config)["input_ids"]


def count(options: Options) -> None:
    from transformers import AutoConfig

    from specheads.decoding.drafters.maxgram import count_bigrams, save_bigrams
    from specheads.hub import hub_options
    from specheads.models.base.loading import load_tokenizer

    refuse_folder(Path(options.output), "--output")
    hub = hub_options(options.base)
    vocab_size = AutoConfig.from_pretrained(options.base, **hub).get_text_config(decoder=True).vocab_size
    table = count_bigrams(token_rows(options, load_tokenizer(options.base, **hub)), vocab_size)
    save_bigrams(table, options.output)
    known = sum(follower > 0 for follower in table)
    print(f"saved {options.output}: a follower for {known} of {vocab_size} tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("train/bigram.py", lambda: count(options_from(Options, __doc__, arguments)))


if __name__ == "__main__":
    listen("train/bigram.py")
    sys.exit(main())
