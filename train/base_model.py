"""Train a small model, Llama-style by default, and its BPE tokenizer from scratch on the standard library's source.

    python train/base_model.py --output_dir out/base --minutes 90
    python train/base_model.py --output_dir out/deeper --init out/base --layers 12 --minutes 80
    python train/base_model.py --output_dir out/small --init out/base --layers 2 --teacher out/base --minutes 30
    python train/base_model.py --output_dir out/longer --init out/base --layers 12 --data src/ --tokens 40e6 \\
        --packages numpy networkx
    python train/base_model.py --output_dir out/hybrid --config recipes/hybrid_base.json --tokenizer checkpoints/base

The second form continues from a saved model and, with more --layers, deepens it: each new layer is a copy of the
one below it whose two output projections start at zero, so that the deeper model starts as the same function.
The third trains a small model that drafts for the first: it keeps fewer --layers, evenly spaced, and learns the
teacher's distribution at each token, not just the token (DistillSpec, arXiv:2310.08461).
The fourth also trains on your own source and on installed packages, whose licences are yours to check. Its budget is in
tokens, which also paces the learning rate. The model is saved every 200 steps: --init continues from there.
The fifth trains another kind of model, here with short convolutions and few attention layers (LFM2), with the
tokenizer of an existing model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specheads.cli.errors import listen
from specheads.cli.script import options_from, run_script


def main(arguments: Sequence[str] | None = None) -> int:
    def work() -> None:
        from specheads.training.base_model.options import Options
        from specheads.training.base_model.run import train

        train(options_from(Options, __doc__, arguments))

    return run_script("train/base_model.py", work)


if __name__ == "__main__":
    listen("train/base_model.py")
    sys.exit(main())
