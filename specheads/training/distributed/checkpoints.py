"""Checkpoints of FSDP2 and DeepSpeed for heads: without the frozen base, and readable by any number of processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, fsdp_utils

from specheads.training.distributed.resume import ResumeError, writers_of

UNIVERSAL, LATEST = "universal", "latest_universal"  # the folder, and the file in which DeepSpeed looks for its name


@contextmanager
def trained_weights_only(accelerator: Any) -> Iterator[None]:
    """In the block accelerate (1.15) saves and loads only trained weights, as it otherwise does only for peft models.

    Applies to FSDP2 with full state dicts, as in recipes/accelerate/.
    """
    plugin, asked = getattr(accelerator.state, "fsdp_plugin", None), getattr(fsdp_utils, "is_peft_model", None)
    whole = plugin is not None and plugin.fsdp_version == 2 and plugin.state_dict_type.name == "FULL_STATE_DICT"
    if asked is None or not whole:
        yield
        return
    fsdp_utils.is_peft_model = lambda model: True
    try:
        yield
    finally:
        fsdp_utils.is_peft_model = asked


def patch_engine(engine: Any) -> None:
    """Make a DeepSpeedEngine leave frozen parameters out of its checkpoints, and read those written by any number of
    processes."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(save_dir: str, *args: Any, exclude_frozen_parameters: bool = True, **options: Any) -> Any:
        return save(save_dir, *args, exclude_frozen_parameters=exclude_frozen_parameters, **options)

    def load_checkpoint(load_dir: str, *args: Any, **options: Any) -> Any:
        options["load_module_strict"] = False  # the base is not in the checkpoint
        written = writers_of(load_dir, PartialState().process_index)
        if written is None or written.processes == PartialState().num_processes:
            return load(load_dir, *args, **options)
        with universal_checkpoint(Path(load_dir)) as folder:
            engine._config.load_universal_checkpoint = True
            try:
                loaded = load(load_dir, *args, **options)
            finally:
                engine._config.load_universal_checkpoint = False
            repair_optimizer(engine.optimizer.optimizer, folder)
        return loaded

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


@contextmanager
def universal_checkpoint(checkpoint: Path) -> Iterator[Path]:
    """In the block, the checkpoint's state by parameter instead of by process, in a temporary folder inside it.
    ResumeError if DeepSpeed cannot convert it."""
    state = PartialState()
    folder = checkpoint / UNIVERSAL
    failure = None
    if state.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was stopped here
        failure = _convert(checkpoint / (checkpoint / "latest").read_text("utf8").strip(), folder)
    (failure,) = broadcast_object_list([failure])
    if failure is not None:
        raise ResumeError(
            f"{checkpoint} was written by another number of processes, and DeepSpeed could not convert it "
            f"for this one: {failure}"
        )
    yield folder
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(folder)
        (checkpoint / LATEST).unlink()


def _convert(parts: Path, folder: Path) -> str | None:
    """Run DeepSpeed's converter → the end of its stderr if it fails, else None."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(
        [*command, *workers, "--input_folder", str(parts), "--output_folder", str(folder)],
        capture_output=True, text=True,
    )  # fmt: skip
    return None if done.returncode == 0 else " ".join(done.stderr.split())[-300:]


def repair_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Repair what DeepSpeed (0.19) restores wrongly at stage 3: all flat parameters share one step count, which each of
    them increments, and every group has the first group's options."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    saved = torch.load(folder / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
    for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
