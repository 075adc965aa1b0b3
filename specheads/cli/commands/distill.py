"""`specheads distill`: rows in the target's own words, and what became of its answers."""

from __future__ import annotations

import sys

from transformers.utils import logging as hf_logging

from specheads.training.self_distill import run as self_distill
from specheads.training.self_distill.options import Options


def run(options: Options) -> None:
    hf_logging.disable_progress_bar()  # its lines would break into the bar of rows
    print(self_distill.run(options).summary(), file=sys.stderr)
