"""Runs llama.cpp's converter in its own process: python gguf_converter.py CONVERTER ARGUMENTS…

The converter recognises a tokenizer by a hash of its output for one text. So it refuses a newly trained tokenizer even
if llama.cpp supports its rules for splitting text. In that case the rules are read here from the tokenizer itself, and
accepted only if they are exactly GPT-2's.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def pre_tokenizer(tokenizer: Any) -> str | None:
    """llama.cpp's name for how a transformers tokenizer splits text before BPE; None if not recognised."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    split, model = parts["pre_tokenizer"] or {}, parts["model"]
    gpt2 = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split.get("add_prefix_space")
    # options that llama.cpp's BPE does not implement under that name
    other = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    plain = model.get("type") == "BPE" and not any(model.get(name) for name in other)
    return "gpt-2" if gpt2 and plain and parts["normalizer"] is None else None


def main(script: str, *arguments: str) -> None:
    folder = Path(script).resolve().parent
    sys.argv = [script, *arguments]
    sys.path[0] = str(folder)  # as if the converter were run directly
    if "NO_LOCAL_GGUF" not in os.environ:
        sys.path.insert(1, str(folder / "gguf-py"))
    from conversion import TextModel

    known = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            name = pre_tokenizer(tokenizer)
            if name is None:
                raise
            print(f"Its rules are those that llama.cpp calls {name}", file=sys.stderr)
            return name

    TextModel.get_vocab_base_pre = get_vocab_base_pre
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
