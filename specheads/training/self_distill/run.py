"""Self-distillation, from options to the finished file."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from specheads.hub import hub_options
from specheads.models.base.loading import load_config, load_tokenizer
from specheads.training.distributed.launch import refuse_several
from specheads.training.self_distill import local
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import stream
from specheads.training.self_distill.rows_file import RowsFile

BATCHES = 4  # per temperature and round; a stopped run loses at most a round


def run(options: Options) -> None:
    """Write the rows, or resume. Raises ValueError, OSError or ImportError; rows written before are safe."""
    refuse_several()
    if options.server:
        from specheads.training.self_distill import served  # needs openai, an optional package

    hub = hub_options(options.base)
    with suppress(OSError):  # an adapter's folder has no config
        load_config(options.base, **hub)  # refuses a draft head
    tokenizer = load_tokenizer(options.base, **hub)
    file = RowsFile(Path(options.output), stream(options, tokenizer))
    file.require_same(options.deciding)
    # A round has several batches of each temperature, so that a finished row can take another question.
    largest = 1 if options.server else BATCHES * options.batch_size * len(options.temperature)

    def round_size(room: int) -> int:
        return min(largest, room)

    asks = file.resume(round_size)
    if not file.finished:
        with tqdm(total=file.stream.wanted, initial=file.lines, unit="row") as bar:
            if options.server:
                asyncio.run(served.fill(file, asks, options, tokenizer, bar))
            else:
                base = local.load(options)
                while not file.finished and (batch := list(islice(asks, round_size(file.stream.wanted - file.lines)))):
                    file.add(batch, local.answer(base, tokenizer, batch, options, file.answers))
                    bar.update(file.lines - bar.n)
    print(file.summary(), file=sys.stderr)
