"""The peak memory of a training step over rows of 1k to 32k tokens, and its time.

    python benchmarks/row_memory.py --anchors 512
    python benchmarks/row_memory.py --lengths 2048 --time

A head over saved features alone, without its base: features and teacher are given, so every byte counted is of the
head's step, forward and backward. Peak: the most bytes of tensors alive at once beyond weights and inputs (see
live_memory.py). Time: CPU seconds of this process, after a first step that is not counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch
from live_memory import LiveMemory
from transformers import LlamaConfig, LlamaForCausalLM

from specheads import convert
from specheads.heads.base import TapBatch
from specheads.losses.teacher import LiveTeacher

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
VOCAB = 512


def batch_of(base: LlamaForCausalLM, length: int, width: int) -> TapBatch:
    """One row of `length` random tokens, with random features (1, T, width) and last hidden states."""
    tokens, columns = torch.randint(VOCAB, (1, length)), torch.arange(length).unsqueeze(0)
    return TapBatch(
        tokens=tokens, features=torch.randn(1, length, width), supervised=columns > 0, position_ids=columns,
        documents=torch.ones_like(tokens), embed=base.get_input_embeddings(), lm_head=base.lm_head, seed=0,
        teacher=LiveTeacher(torch.randn(length, SIZES["hidden_size"]), base.lm_head),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", default="eagle3")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024 << i for i in range(6)])
    parser.add_argument("--anchors", type=int, help="of a row (default: every start)")
    parser.add_argument("--steps", type=int, default=3, help="unrolled steps")
    parser.add_argument("--time", action="store_true", help="the median CPU seconds of five steps, not memory")
    options = parser.parse_args()

    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=6, **SIZES))
    more = {} if options.anchors is None else {"anchors": options.anchors}
    if options.head != "parallel":
        more["steps"] = options.steps
    head = convert(base, options.head, **more).head.train()
    head.loss(batch_of(base, 64, SIZES["hidden_size"] * len(head.layers)))[0].backward()  # gradients exist from here on

    def step(batch: TapBatch) -> float:
        began = time.process_time()
        head.loss(batch)[0].backward()
        return time.process_time() - began

    print("length | " + ("CPU seconds" if options.time else "peak MiB | KiB a token"))
    for length in options.lengths:
        batch = batch_of(base, length, SIZES["hidden_size"] * len(head.layers))
        if options.time:
            step(batch)
            print(f"{length:,} | {median(step(batch) for _ in range(5)):.2f}", flush=True)
            continue
        with LiveMemory() as memory:
            step(batch)
        print(f"{length:,} | {memory.peak / 2**20:.1f} | {memory.peak / 2**10 / length:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
