"""The demo's base if the package came without one: a tiny model, trained on the standard library in about a minute."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from specheads import terminal
from specheads.training.base_model.options import Options
from specheads.training.base_model.run import RECORD, train

MINUTES = 1.0  # of training
FILES = 250  # of the standard library: quickly encoded, and more than two cores train on in that time


def own_base(folder: Path, seed: int, out: Console) -> Path:
    """Make sure that `folder` has a base: one from an earlier demo, or one trained now."""
    if (folder / RECORD).is_file():
        out.print(f"base: {folder}, which an earlier demo trained; delete the folder to train another")
        return folder
    options = Options(
        str(folder), layers=4, hidden_size=128, intermediate_size=352, head_dim=32, vocab_size=2048, batch_size=16,
        sequence_length=128, files=FILES, minutes=MINUTES, save_steps=10**9, seed=seed,
    )  # fmt: skip
    with terminal.progress(out, "training a base") as tell:
        train(options, say=lambda line: None, tell=tell)
    record = json.loads((folder / RECORD).read_text("utf8"))
    out.print(
        f"saved {folder}: {record['parameters'] / 1e6:.1f}M parameters, {record['tokens'] / 1e3:.0f}k tokens, held-out "
        f"loss {record['held_out_loss']:.2f}. After so little training it repeats itself more than it writes Python; "
        "what the demo shows is that drafts do not change its text"
    )
    return folder
