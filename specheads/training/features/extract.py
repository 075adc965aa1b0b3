"""Save a base's features: one pass over a recipe's data, into files that training reads instead of running the base.

The options alone determine the rows of each file, so any number of processes write the same files, and a stopped run
resumes with the first missing one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedModel

from specheads.data.batches import Collator
from specheads.data.datasets import build_datasets
from specheads.data.images import processor_of, tokenizer_of
from specheads.data.rows import IGNORED
from specheads.decoding.verify.hf_base import decoder_of, layer_count, text_config
from specheads.decoding.verify.model_inputs import input_device
from specheads.decoding.verify.taps import captures_of
from specheads.files import remove_unfinished
from specheads.heads import HEADS
from specheads.hub import commit_of
from specheads.models.base.fingerprint import fingerprint_base
from specheads.models.base.loading import quantization_of
from specheads.training.distributed import launch
from specheads.training.features import frozen_weights
from specheads.training.features.index import INDEX, Index, parse_teacher_probs, read_index
from specheads.training.features.passes import FeaturePasses
from specheads.training.features.plan import (
    AUTOCAST,
    Confirm,
    SaveOptions,
    autocast_of,
    base_dtype,
    bytes_per_token,
    confirm_size,
    num_tokens,
    saved_files,
    tapped_layers,
)
from specheads.training.features.shards import FeatureError, Shard, file_fingerprint, write
from specheads.training.recipe.loading import load_base, load_tokens, padding_id
from specheads.training.recipe.recipe import Recipe


@dataclass(frozen=True)
class Saved:
    """What a run did. tokens, bytes, files: in the folder, with the parts of the base; made: files written by this
    process."""

    folder: Path
    rows: int
    tokens: int
    bytes: int
    files: int
    made: int


def save_features(recipe: Recipe, options: SaveOptions, ask: Confirm | None = None) -> Saved:
    """Save the features of a recipe's base on its data. ask: called with the plan before anything is written, returns
    whether to continue; None: do not ask.

    FeatureError if the folder holds other features, the disk has too little room, or a file cannot be written;
    LaunchError if the running processes are not those asked for; errors of data and models.
    """
    if recipe.features or recipe.data is None:
        raise FeatureError(f"the recipe has features={recipe.features!r}: saving them takes base and data, without it")
    state, folder = PartialState(cpu=not torch.accelerator.is_available()), options.output
    launch.check(recipe.launch, state.num_processes)
    whole, processing, stops = load_tokens(recipe)
    config = whole.get_text_config(decoder=True)
    taps = tapped_layers(recipe, options, config)
    with state.main_process_first():
        datasets = build_datasets(recipe.data, processing, config.vocab_size, stops)
    splits = {name: rows for name, rows in zip(("train", "eval"), datasets, strict=True) if rows is not None}
    rows, tokens = sum(map(len, splits.values())), sum(map(num_tokens, splits.values()))
    token_bytes = bytes_per_token(config, taps, options, recipe)
    if state.is_main_process:
        base_bytes = frozen_weights.kept_bytes(whole, base_dtype(config, recipe))
        confirm_size(folder, tokens, token_bytes, base_bytes, ask)
    base = load_base(recipe).eval()
    if recipe.quantize is None:  # a quantised base is loaded onto its device
        base = base.to(state.device)
    index = Index(
        taps=taps, dtype=_dtype_name(options.dtype, base), teacher_probs=parse_teacher_probs(options.teacher_probs),
        last_tap=_last_tap(base, taps), batch_size=options.batch_size,
        shard_rows=max(1, round(options.shard_mb * 2**20 * rows / (tokens * token_bytes))),
        pad_token_id=padding_id(tokenizer_of(processing)), base=_record(base, recipe),
        rows={name: len(data) for name, data in splits.items()}, files={}, kept={},
    )  # fmt: skip
    if state.is_main_process:
        _open(folder, index, base)
    state.wait_for_everyone()
    passes = FeaturePasses(base, index, processor_of(processing))
    made = _write_shards(folder, splits, passes, state)
    state.wait_for_everyone()
    if state.is_main_process:
        _finish(folder, index)
    state.wait_for_everyone()
    size, number = sum(path.stat().st_size for path in saved_files(folder)), len(list(folder.glob("*.safetensors")))
    return Saved(folder, rows, tokens, size, number, made)


def _write_shards(folder: Path, splits: Mapping[str, Any], passes: FeaturePasses, state: PartialState) -> int:
    """Write this process's share of the missing files → how many it wrote."""
    work = [(name, *shard) for name in splits for shard in passes.index.shards(name)]
    work, made = work[state.process_index :: state.num_processes], 0
    total, hidden = sum(len(rows) for *_, rows in work), not state.is_local_main_process
    dtype = AUTOCAST[passes.index.base["autocast"]]
    with tqdm(total=total, unit="row", disable=hidden) as bar:
        for name, file, rows in work:
            chosen = [splits[name][i] for i in rows]
            if (folder / file).exists():
                _refuse_others(Shard(folder / file), chosen)
                bar.update(len(rows))
            else:
                with torch.autocast(state.device.type, dtype, enabled=dtype is not None):
                    saved = passes.shard(chosen, bar.update)
                write(folder / file, saved)  # outside autocast, where float8 tensors can be concatenated
                made += 1
    return made


def _finish(folder: Path, index: Index) -> None:
    """Write the final index, which lists every file and so marks the folder as complete."""
    files = {name: [file_fingerprint(folder / file) for file, _ in index.shards(name)] for name in index.rows}
    kept = file_fingerprint(folder / frozen_weights.FOLDER / frozen_weights.WEIGHTS)
    replace(index, files=files, kept=kept).write(folder)


def _dtype_name(name: str, base: PreTrainedModel) -> str:
    return str(base.dtype).removeprefix("torch.") if name == "auto" else name


@torch.no_grad()
def _last_tap(base: PreTrainedModel, taps: Sequence[int]) -> int | None:
    """The tap that equals the last hidden state, bit for bit on a few tokens, so that it is saved once; or None."""
    last = layer_count(text_config(base))
    if last not in taps:
        return None
    ids = torch.arange(4, device=input_device(base)).unsqueeze(0)
    with captures_of(base).installed():
        out = decoder_of(base)(input_ids=ids, use_cache=False, output_hidden_states=True)
    same = out.hidden_states is not None and torch.equal(out.hidden_states[last], out.last_hidden_state)
    return last if same else None


def _record(base: PreTrainedModel, recipe: Recipe) -> dict[str, Any]:
    name = base.name_or_path or ""
    return {
        "name": str(Path(name).resolve()) if Path(name).is_dir() else name, "revision": commit_of(base),
        "fingerprint": fingerprint_base(base), "dtype": str(base.dtype).removeprefix("torch."), "unfit": _unfit(base),
        "quantization": quantization_of(base), "autocast": autocast_of(recipe.training),
    }  # fmt: skip


def _unfit(base: PreTrainedModel) -> dict[str, str]:
    """Kinds of head that cannot learn from this base, and why. Recorded, since testing it takes the base's weights."""
    reasons = {}
    for kind, head in HEADS.items():
        try:
            with torch.device("meta"):
                module = head(head.Config().with_base_defaults(text_config(base)))
            module.refuse_unfit(base)
        except ValueError as error:
            reasons[kind] = str(error)
    return reasons


def _open(folder: Path, index: Index, base: PreTrainedModel) -> None:
    """Create the folder, or check that it was begun with the same options."""
    remove_unfinished(folder / INDEX)  # else the folder would not count as ours
    if (folder / INDEX).exists():
        if differing := read_index(folder).differences(index):
            raise FeatureError(
                f"{folder} holds features saved with other options ({'; '.join(differing)}): give another {{output}}, "
                "or the options it was begun with",
                output=...,
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FeatureError(f"{folder} holds something other than saved features: give a new {{output}}", output=...)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        index.write(folder)  # first: it marks the folder as begun
    if not (folder / frozen_weights.FOLDER / frozen_weights.WEIGHTS).exists():
        frozen_weights.save_base_parts(base, folder)


def _refuse_others(shard: Shard, rows: Sequence[dict[str, list[int]]]) -> None:
    batches = [Collator(0)([{**row, "images": None}]) for row in rows]
    columns = {name: torch.cat([b[name][0] for b in batches]) for name in ("input_ids", "document_ids", "position_ids")}
    columns["supervised"] = torch.cat([b["labels"][0] != IGNORED for b in batches])
    differing = [name for name, column in columns.items() if not torch.equal(shard.whole(name).long(), column.long())]
    if len(shard) != len(rows) or differing:
        raise FeatureError(
            f"{shard.path} holds other rows than the data gives now (in {', '.join(differing) or 'number'}): give "
            "another {output}, or the data of before",
            output=...,
        )
