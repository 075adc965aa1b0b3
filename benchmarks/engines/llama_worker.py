"""The worker process of llama.cpp, run by the Python of an environment with llama-cpp-python and gguf.

It answers the requests of `peer.Peer`. Nothing from specheads or torch is imported here.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
GGML_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Engines:
    """The open contexts, by key."""

    def __init__(self, llama_cpp: Any, speculative: Any, gguf: Any) -> None:
        self.llama_cpp, self.speculative, self.gguf = llama_cpp, speculative, gguf
        self.by_key: dict[str, Any] = {}

    def versions(self) -> dict[str, Any]:
        return {"llama_cpp_python": self.llama_cpp.__version__, "gguf": importlib.metadata.version("gguf")}

    def convert(self, model: str, out: str) -> dict[str, Any]:
        """Convert the files in the folder `model`, as `llama_source` describes them, into one GGUF file."""
        import numpy

        header = json.loads(Path(model, "gguf.json").read_text("utf8"))
        (architecture,) = (value for key, _, value in header["metadata"] if key == "general.architecture")
        writer = self.gguf.GGUFWriter(out, architecture)
        add = {
            "string": writer.add_string, "uint32": writer.add_uint32, "float32": writer.add_float32,
            "bool": writer.add_bool, "strings": writer.add_array, "int32s": writer.add_array,
        }  # fmt: skip
        for key, kind, value in header["metadata"]:
            if key != "general.architecture":  # the writer has already added it
                add[kind](key, value)
        for name, shape, dtype, offset in header["tensors"]:
            *rows, width = shape
            stored = [*rows, width * ITEM_SIZES[dtype]]
            values = numpy.fromfile(
                Path(model, "tensors.bin"), dtype=numpy.uint8, count=math.prod(stored), offset=offset
            )
            kind = getattr(self.gguf.GGMLQuantizationType, GGML_TYPES[dtype])
            if dtype == "float32":
                writer.add_tensor(name, values.view(numpy.float32).reshape(shape))
            else:
                writer.add_tensor(name, values.reshape(stored), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return {}

    def open(
        self, key: str, base: str, num_threads: int, num_positions: int, exact_cache: bool, lookup: int = 0,
        ngram: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """Load a model. exact_cache: keys and values in float32, not float16. lookup: tokens drafted by prompt lookup,
        after a match of at most `ngram` tokens; 0: no drafts."""
        options: dict[str, Any] = {}
        if lookup:
            draft = self.speculative.LlamaPromptLookupDecoding(max_ngram_size=ngram, num_pred_tokens=lookup)
            options = {"draft_model": draft, "logits_all": True}
        if exact_cache:
            options |= {"type_k": self.llama_cpp.GGML_TYPE_F32, "type_v": self.llama_cpp.GGML_TYPE_F32}
        self.by_key[key] = Counted(self.llama_cpp.Llama(
            base, n_ctx=num_positions, n_threads=num_threads, n_threads_batch=num_threads, verbose=False, **options
        ))  # fmt: skip
        return {}

    def generate(
        self, key: str, ids: list[list[int]], mask: list[list[int]], max_new_tokens: int, temperature: float, seed: int,
        ends: list[int],
    ) -> dict[str, Any]:  # fmt: skip
        engine = self.by_key[key]
        (row,), (real,) = ids, mask
        prompt = [token for token, is_real in zip(row, real, strict=True) if is_real]
        engine.llama.set_seed(seed)
        tokens: list[int] = []
        began = time.perf_counter()
        engine.restart()
        for token in engine.llama.generate(prompt, temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0):
            tokens.append(int(token))
            if len(tokens) == max_new_tokens or tokens[-1] in ends:
                break
        seconds = time.perf_counter() - began
        counts = {"gained": len(tokens) - 1, "rows_stepped": engine.passes - 1}
        return {"tokens": [tokens], "seconds": seconds, "statistics": counts}

    def logits(self, key: str, ids: list[int]) -> dict[str, Any]:
        """The logits at the last position of `ids`, for checks."""
        engine = self.by_key[key]
        engine.restart()
        engine.llama.eval(ids)
        pointer, size = engine.llama._ctx.get_logits_ith(-1), engine.llama.n_vocab()
        return {"logits": [pointer[i] for i in range(size)]}


class Counted:
    """An engine, and how many passes it has made since its last restart."""

    def __init__(self, llama: Any) -> None:
        self.llama, self.passes = llama, 0
        evaluate = llama.eval

        def counted(tokens: Any) -> None:
            self.passes += 1
            evaluate(tokens)

        llama.eval = counted

    def restart(self) -> None:
        """Clear the cache, so that the next prompt does not reuse a prefix that it shares with the last text."""
        self.llama.reset()
        self.passes = 0


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf8")
    os.dup2(2, 1)  # keeps what libraries print out of the answers on stdout
    try:
        import gguf
        import llama_cpp
        from llama_cpp import llama_speculative

        engines = Engines(llama_cpp, llama_speculative, gguf)
        problem = ""
    except ImportError as error:
        engines, problem = None, f"{error}; pip install llama-cpp-python gguf in its environment"
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if engines is None:
                raise RuntimeError(problem)
            answer = getattr(engines, request.pop("op"))(**request)
        except Exception as error:  # any error is sent back and reported there
            answer = {"error": " ".join(str(error).split())[:400] or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
