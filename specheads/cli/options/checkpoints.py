"""The options of doctor, info, export and import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specheads.cli.complete import ENGINES, complete_words
from specheads.cli.options.shared import HEAD, Output
from specheads.options import argument, option

STORED = "Dtype to store: float32, bfloat16 or float16 (default: the checkpoint's)."


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Output):
    """Check what is installed, and what will be fast or slow here.

    It lists the packages that are installed, missing or too old, and the devices. The exit status is 1 if a required
    package is missing, too old or does not load.

    \b
    Examples:
      specheads doctor
      specheads doctor --network
      specheads doctor --json > machine.json
    """

    network: bool = option(False, "Also check whether the model hub answers.")


@dataclass(frozen=True, kw_only=True)
class InfoOptions(Output):
    """Show what a head checkpoint holds, and an export's certificate.

    \b
    Examples:
      specheads info out/head
      specheads info served
      specheads info out/head --json
    """

    path: Path = argument("PATH", "A head checkpoint or an export.", named=True)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Output):
    """Write a head in the format of another program.

    A README beside it says how to serve it. If the format cannot hold the head, the error gives the reason and the
    formats that can. With --certify the exit status is that of audit: 3 if the engine's text is not the base's, 4 if
    that is undecided.

    \b
    Examples:
      specheads export out/head served --to vllm
      specheads export out/head served --to llamacpp --gguf llama.cpp
      specheads export out/head served --to vllm --base my/model
      specheads export out/head served --to vllm --certify vllm=venv/bin/python
    """

    model: str = argument("MODEL", HEAD, named=True)
    out: Path = argument("OUT", "A new directory for the export.")
    to: str = option(help=f"{', '.join(ENGINES[:-1])} or {ENGINES[-1]}.", autocompletion=complete_words(*ENGINES))
    base: str | None = option(None, "Base model to use instead of the one the checkpoint names.")
    dtype: str | None = option(None, STORED)
    embeddings: bool = option(False, "Also store the base's embeddings, if the format makes that optional.")
    gguf: Path | None = option(
        None, "llama.cpp's checkout or converter: also write GGUF files of base and head (llamacpp)."
    )
    check: bool = option(False, "Compare what transformers reads of the result with the head.")
    certify: list[str] | None = option(
        None,
        "NAME=PROGRAM: run it in vllm or openvino (PROGRAM: its Python) or llama.cpp (llama-server), and audit it.",
    )


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Output):
    """Read a head that another program wrote.

    Formats: EAGLE, EAGLE-3, Medusa, Hydra, DFlash, JetSpec, DSpark, speculators, SpecForge, ModelOpt, vLLM. The format
    is recognised by its files. The result decodes, trains and exports like any other head.

    \b
    Examples:
      specheads import org/eagle3-head heads/qwen3 --base Qwen/Qwen3-8B
      specheads import downloaded/medusa heads/medusa \\
        --base lmsys/vicuna-7b-v1.3 --allow-pickle
    """

    source: str = argument("SOURCE", "Another program's checkpoint: a directory or a hub id.")
    out: Path = argument("OUT", "A new directory for the head.")
    base: str | None = option(None, "Its base model (default: the one the checkpoint names).")
    allow_pickle: bool = option(False, "Read .bin and .pt files, tensors only.")
    allow_nonfinite: bool = option(False, "Accept NaN and Inf among the weights.")
    dtype: str | None = option(None, STORED)
