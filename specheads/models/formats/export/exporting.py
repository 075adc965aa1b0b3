"""Writes a head in another program's format: config, tensors and a README with the serving command."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.model_inputs import forward_arguments
from specheads.heads import DraftHead
from specheads.models.base.loading import as_dtype
from specheads.models.base.lora import adapters
from specheads.models.config import SpecConfig
from specheads.models.files import (
    CONFIG,
    DTYPES,
    CheckpointError,
    absolute,
    accepted_length,
    changes_dtype,
    refuse_nonempty,
    results,
    run_of,
)
from specheads.models.formats import FORMATS
from specheads.models.formats.eagle import transformers4
from specheads.models.formats.export import gguf_files
from specheads.models.formats.format import ExportFiles, Format, embeddings_of
from specheads.options import refuse_unknown
from specheads.version import __version__

_DECODED = {"temperature", "prompts", "new_tokens", "tree", "accepted_length"}
_WRITTEN = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]


def export(
    config: SpecConfig, base: PreTrainedModel, head: DraftHead, out: Any, to: str, *,
    dtype: torch.dtype | str | None = None, embeddings: bool = False,
    gguf: Path | str | None = None,
) -> Path:  # fmt: skip
    """Write `head` into the directory `out` in a format of `to`, all of it or nothing; returns `out`.

    to: the engine of one of FORMATS. dtype: of the weights (default: unchanged). embeddings: also store the base's, if
    the format makes that optional. gguf: llama.cpp's checkout or converter; with to="llamacpp", also write GGUF files
    of base and head, both in `dtype` if given.
    CheckpointError if the format cannot hold the head, with the reason and the formats that can; if `out` already holds
    files; if the format needs tensors of the base that are not in memory; if the converter fails.
    """
    wanted = as_dtype(dtype)
    if wanted not in (None, *_WRITTEN):
        names = ", ".join(str(each).removeprefix("torch.") for each in _WRITTEN)
        raise ValueError(f"dtype={dtype}: no program reads a head in it; expected {names}")
    form, folder = form_for(config, base, head, to), Path(out).resolve()
    make_gguf = _gguf(config, base, head, to, wanted, gguf) if gguf is not None else None
    refuse_nonempty(folder, "export into")
    if folder.exists() and folder.samefile(Path.cwd()):
        raise CheckpointError(f"{folder} is the current directory, which the export would replace; name one inside it")
    tensors = head_tensors(head, wanted)
    written = form.write(head.config, tensors, base)
    named = {name: t.contiguous().clone() for name, t in written.tensors.items()}
    if embeddings and form.embeds is None:
        raise CheckpointError(f"{form.title} cannot hold the base's embeddings; export without them")
    if (embeddings or form.embeds) and "embed_tokens.weight" not in named:
        weight = next(t for t in tensors.values() if t.is_floating_point())
        named["embed_tokens.weight"] = embeddings_of(base).to("cpu", weight.dtype).contiguous().clone()
    base_name, path = absolute(config.base_model_name_or_path or "BASE"), str(folder)
    in_yaml = path if shlex.quote(path) == path else json.dumps(path)
    texts = {
        name: text.replace("{folder}", in_yaml) if name.endswith(".yml") else text
        for name, text in written.texts.items()
    }
    texts[CONFIG] = json.dumps(written.config, indent=2) + "\n"
    served = f"{path}/{transformers4.FOLDER}" if any("/" in name for name in texts) else base_name
    texts["README.md"] = readme(form, head, run_of(config.name_or_path, head), base_name, path, served)
    if "pixel_values" in forward_arguments(base):
        texts["README.md"] += IMAGES
    _write(folder, written, named, texts, make_gguf)
    return Path(out)


def _gguf(
    config: SpecConfig, base: PreTrainedModel, head: DraftHead, to: str, dtype: torch.dtype | None, gguf: Path | str
) -> Callable[[Path], None]:
    """A function that writes the GGUF files into an export's folder. Everything it needs is checked here first."""
    if to != "llamacpp":
        raise ValueError(f"GGUF files are for llamacpp, not for {to}; leave gguf out")
    script = gguf_files.converter(gguf)
    source = gguf_files.folder_of(config.base_model_name_or_path, config.base_revision)
    dtypes = (dtype or base.dtype, dtype or head.dtype)
    for each in dtypes:
        gguf_files.outtype(each)
    return lambda folder: gguf_files.write(script, folder, source, dtypes)


def form_for(config: SpecConfig, base: PreTrainedModel, head: DraftHead, to: str) -> Format:
    """The format that holds this head for that engine. ValueError if there is no such engine, CheckpointError if none
    of its formats can hold the head."""
    refuse_unknown([to], sorted({form.engine for form in FORMATS}), what="format to export to")
    if has_adapters(config, base):
        raise CheckpointError(
            "this head was trained with adapters of its base, which no format holds; merge the adapters into "
            "the base, save it, and put the head beside that base"
        )
    able = engines_for(config, base, head)
    nearest = f"formats that can: {', '.join(able)}" if able else "no format can"
    forms = [form for form in FORMATS if (form.engine, form.kind) == (to, head.config.kind)]
    if not forms:
        raise CheckpointError(f"{to} has no form for a head of kind {head.config.kind}; {nearest}")
    tensors, reasons = head_tensors(head), []
    for form in forms:
        if not (wrong := form.refusals(head.config, tensors, base)):
            return form
        reasons.append(f"{form.title} cannot hold this head: {'; '.join(wrong)}")
    raise CheckpointError("; ".join([*reasons, nearest]))


def has_adapters(config: SpecConfig, base: PreTrainedModel) -> bool:
    """Does the base have adapters, whether trained with the head or there before?"""
    return config.joint is not None or bool(adapters(base))


def engines_for(config: SpecConfig, base: PreTrainedModel, head: DraftHead) -> list[str]:
    """The engines whose formats can hold this head; [] if its base has adapters, which no format holds."""
    if has_adapters(config, base):
        return []
    tensors = head_tensors(head)
    forms = [form for form in FORMATS if form.kind == head.config.kind]
    return sorted({form.engine for form in forms if not form.refusals(head.config, tensors, base)})


def head_tensors(head: DraftHead, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The head's tensors by our names, on the CPU, in `dtype` except for those that keep their own."""
    state = {name: t.detach().to("cpu") for name, t in head.state_dict().items()}
    if any(hasattr(t, "full_tensor") for t in state.values()):
        raise CheckpointError("the head's tensors are shards; save the head, load it in one process, and export that")
    if dtype is None:
        return state
    return {name: t.to(dtype) if changes_dtype(name, t) else t for name, t in state.items()}


def _write(
    folder: Path, written: ExportFiles, tensors: dict[str, Tensor], texts: dict[str, str],
    more: Callable[[Path], None] | None,
) -> None:  # fmt: skip
    """Write all files into a temporary directory, then rename it, so that a crash leaves nothing under the final name.

    A directory that already exists may be a mount point and is not replaced: files are moved into it, the config last.
    more: writes further files made from the others. The temporary directory is nested in another so that it can have
    the final name, which llama.cpp's converter writes into its files."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden, there = f".{folder.name}.{secrets.token_hex(4)}", folder.is_dir()
    around = folder / hidden if there else folder.with_name(hidden)
    temporary = around / folder.name
    temporary.mkdir(parents=True)
    try:
        if written.weights.endswith(".safetensors"):
            save_file(tensors, temporary / written.weights, metadata={"format": "pt"})
        else:
            torch.save(tensors, temporary / written.weights)
        for name, values in written.pickles.items():
            torch.save(values, temporary / name)
        for name, path in written.links.items():
            (temporary / name).symlink_to(path)
        for name, text in texts.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text(text, "utf8")
        if more is not None:
            more(temporary)
        mode = (temporary / CONFIG).stat().st_mode
        for path in temporary.rglob("*"):
            if path.is_symlink() or not path.is_file():
                continue
            path.chmod(mode)  # the umask's permissions; safetensors would make the file readable by its owner only
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        if there:
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == CONFIG):
                os.rename(path, folder / path.name)
        else:
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(around, ignore_errors=True)


IMAGES = """
## Images

This export is a head for text. No server was run with it on images. After an image its drafts may fit less well: the
head learnt the placeholder's embedding, where SGLang gives a draft the image's, and the files say nothing of positions
of several parts (mrope). The text is the base's in any case.
"""


def readme(form: Format, head: DraftHead, checkpoint: Any, base: str, folder: str, served: str) -> str:
    """Markdown for the directory of an export. checkpoint: the folder with the head and its run, if any; base: the
    base's name; served: its name in the other program's commands."""
    config: Any = head.config
    lines = [
        f"# {form.title}", "",
        f"A draft head of kind {config.kind} for `{base}`, exported by specheads {__version__}.", "",
        form.serve(served, folder, config.served_depth).rstrip(), "",
        f"Written for: {form.versions}. docs/compatibility.md of specheads says what was run and what was only read.",
    ]  # fmt: skip
    lines += ["", "The paths above are those of the machine that wrote this.", "", "## What to expect", ""]
    if rows := measured(checkpoint, head.scored_depths):
        lines += [
            "Tokens gained in one step of decoding (the accepted length, the bonus token included):", "",
            "| text | how it was measured | tokens a step |", "|---|---|---:|",
            *(f"| {text} | {how} | {length:.2f} |" for text, how, length in rows), "",
            "Compare a server with a decoded row of the same temperature and draft length: sampled text accepts less, "
            "longer drafts more. An estimate weighs every position alike, so decoding differs from it. If the server "
            "accepts much less, it has loaded the head wrongly; the text is right even then.",
        ]  # fmt: skip
    else:
        lines += [
            "Its accepted length was not recorded; `specheads bench` measures it. Compare the server with its greedy "
            "figure: a head that is loaded wrongly still gives the right text, only slowly.",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def measured(checkpoint: Any, depth: int) -> list[tuple[str, str, float]]:
    """Recorded accepted lengths of the head: (greedy or sampled, how it was measured, tokens per step).

    depth: drafted tokens that training scores. The figures were recorded by training (estimates, and decoding in the
    parity gate) and by benchmarks/accepted_length.py (`decoded`).
    """
    folder = Path(str(checkpoint or ""))
    metrics = results(folder) if checkpoint and folder.is_dir() else {}
    estimate = f"estimated by training on its held-out rows, a chain of {depth} from every position"
    decoded = "decoded at the end of its training, held-out prompts"
    known = [
        ("greedy", f"{estimate}: first choices that are the base's own", accepted_length(checkpoint)),
        ("sampled, T = 1", f"{estimate}: overlap of the distributions", metrics.get("eval_accepted_length_sampled")),
        ("greedy", f"{decoded}, a chain of {depth}", metrics.get("parity_measured")),
        ("greedy", f"{decoded}, its default tree", metrics.get("parity_served")),
    ]
    recorded = metrics.get("decoded")
    for run in recorded if isinstance(recorded, list) else ():
        if not isinstance(run, dict) or not run.keys() >= _DECODED or not isinstance(run["temperature"], int | float):
            continue  # written by another program or a later version
        temperature = run["temperature"]
        text = f"sampled, T = {temperature:g}" if temperature else "greedy"
        prompts = f"{run['prompts']} prompts of {run.get('set', 'held-out files')}"
        how = f"decoded by specheads, {prompts} × {run['new_tokens']} tokens, {run['tree']}"
        known.append((text, how, run["accepted_length"]))
    return [(text, how, float(length)) for text, how, length in known if isinstance(length, int | float)]
