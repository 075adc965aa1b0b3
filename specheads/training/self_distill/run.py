"""Self-distillation, from options to the finished file."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from specheads.data.images import tokenizer_of
from specheads.hub import hub_options
from specheads.models.base.loading import load_config, load_processing, load_tokenizer
from specheads.training.distributed.launch import refuse_several
from specheads.training.self_distill import local
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import stream
from specheads.training.self_distill.rows_file import RowsFile


def run(options: Options) -> RowsFile:
    """Write the rows, or resume → the finished file.

    Raises ValueError, OSError or ImportError; rows written before are safe, and of Ctrl-C it says where it stopped.
    """
    refuse_several()
    if options.server:
        from specheads.training.self_distill import served  # needs openai, an optional package

    hub = hub_options(options.base)
    config = None
    with suppress(OSError):  # an adapter's folder has no config
        config = load_config(options.base, **hub)  # refuses a draft head
    processing = load_tokenizer(options.base, **hub) if config is None else load_processing(options.base, config, **hub)
    file = RowsFile(Path(options.output), stream(options, processing))
    file.require_same(options.deciding)
    asks = file.resume()
    if not file.finished:
        try:
            with tqdm(total=file.stream.wanted, initial=file.lines, unit="row") as bar:
                if options.server:
                    asyncio.run(served.fill(file, asks, options, tokenizer_of(processing), bar))
                else:
                    local.fill(file, asks, options, processing, bar)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"with {file.lines} of {file.stream.wanted} rows in {file.path}; the same command resumes"
            ) from None
        file.discard_ahead()
    return file
