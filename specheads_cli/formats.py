"""specheads export, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import Base, Json, Model, app, emit
from specheads_cli.complete import ENGINES, complete_words

Stored = Annotated[
    str | None, typer.Option(help="Dtype to store: float32, bfloat16 or float16 (default: the checkpoint's).")
]


@app.command()
def export(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the export.")],
    to: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(ENGINES[:-1])} or {ENGINES[-1]}.",
            autocompletion=complete_words(*ENGINES),
        ),
    ],
    base: Base = None,
    dtype: Stored = None,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Also store the base's embeddings, if the format makes that optional.")
    ] = False,
    gguf: Annotated[
        Path | None,
        typer.Option(help="llama.cpp's checkout or converter: also write GGUF files of base and head (llamacpp)."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare what transformers reads of the result with the head.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a head in the format of another program.

    A README beside it says how to serve it. If the format cannot hold the head, the error gives the reason and the
    formats that can.

    \b
    Examples:
      specheads export out/head served --to vllm
      specheads export out/head served --to llamacpp --gguf llama.cpp
      specheads export out/head served --to vllm --base my/model
    """
    from specheads.cli.commands import formats

    record = formats.export(model, out, to, base=base, dtype=dtype, embeddings=embeddings, gguf=gguf, check=check)
    if as_json:
        emit(record)
    else:
        formats.show(record)


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Another program's checkpoint: a directory or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the head.")],
    base: Annotated[str | None, typer.Option(help="Its base model (default: the one the checkpoint names).")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read .bin and .pt files, tensors only.")
    ] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Accept NaN and Inf among the weights.")
    ] = False,
    dtype: Stored = None,
    as_json: Json = False,
) -> None:
    """Read a head that another program wrote.

    Formats: EAGLE, EAGLE-3, Medusa, Hydra, DFlash, JetSpec, DSpark, speculators, SpecForge, ModelOpt, vLLM. The format
    is recognised by its files. The result decodes, trains and exports like any other head.

    \b
    Examples:
      specheads import org/eagle3-head heads/qwen3 --base Qwen/Qwen3-8B
      specheads import downloaded/medusa heads/medusa --base lmsys/vicuna-7b-v1.3 --allow-pickle
    """
    from specheads.cli.commands import formats

    record = formats.import_head(
        source, out, base=base, allow_pickle=allow_pickle, allow_nonfinite=allow_nonfinite, dtype=dtype
    )
    if as_json:
        emit(record)
    else:
        formats.show(record)
