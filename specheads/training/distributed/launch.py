"""Compare what a launcher was asked for with what it started: launchers silently fall back to less.

`accelerate launch --cpu --num_processes 2` starts one process; FSDP2 on CPUs trains as plain DDP; torchrun without a
GPU and without use_cpu starts independent runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.options import OptionError

# Kind → what is sharded over the processes; each holds the rest whole.
KINDS: dict[str, tuple[str, ...]] = {
    "no": (), "ddp": (),
    "fsdp": ("optimizer", "gradients", "weights"), "fsdp2": ("optimizer", "gradients", "weights"),
    "zero1": ("optimizer",), "zero2": ("optimizer", "gradients"), "zero3": ("optimizer", "gradients", "weights"),
}  # fmt: skip
FROM_FIRST = ("fsdp2", "zero3")  # the first process loads the base, and sends the others their shards
SHARDED = tuple(kind for kind, parts in KINDS.items() if "weights" in parts)  # no process has the whole model


class LaunchError(ValueError):
    """The running processes are not those that were asked for."""


class QuantisedBase(LaunchError):
    """A base that cannot be sharded."""

    def __init__(self) -> None:
        super().__init__(
            "a quantised base cannot be sharded (zero3, fsdp2), as its weights are no matrices: use ddp, zero1 or zero2"
        )


@dataclass(frozen=True)
class LaunchConfig:
    """What is expected. processes: their total number; distributed: one of KINDS. None: not checked."""

    processes: int | None = None
    distributed: str | None = None

    def __post_init__(self) -> None:
        if self.distributed is False:  # YAML's plain `no`
            object.__setattr__(self, "distributed", "no")
        if self.processes is not None and (type(self.processes) is not int or self.processes < 1):
            raise OptionError(
                "{launch.processes}: expected a whole number of at least 1", **{"launch.processes": self.processes}
            )
        if self.distributed is not None and self.distributed not in tuple(KINDS):  # a list has no hash
            raise OptionError(
                f"{{launch.distributed}}: expected one of {', '.join(KINDS)}",
                **{"launch.distributed": self.distributed},
            )


def check(asked: LaunchConfig, processes: int, distributed: str | None = None) -> None:
    """LaunchError unless this run is what the recipe, the launcher's environment and its command line ask for.

    distributed: None if not known yet, and then not compared.
    """
    requests = {
        "the recipe's launch section": asked,
        "the launcher's environment": from_environment(os.environ),
        "the launcher's command line": from_command(_parent_command()),
    }
    for source, request in requests.items():
        if request.processes is not None and request.processes != processes:
            raise LaunchError(
                f"{source} asks for {request.processes} processes, but this run has {processes}{_hint(request)}"
            )
        if distributed and request.distributed and request.distributed != distributed:
            raise LaunchError(
                f"{source} asks for distributed training of the kind {request.distributed!r}, but this run has "
                f"{distributed!r}{_hint(request)}"
            )


def refuse_several() -> None:
    """ValueError if a launcher has started several processes, for programs whose output one process writes."""
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"{processes} processes were started, and each would write all of the output to the same files: this runs "
            "in one process, without a launcher"
        )


def _hint(request: LaunchConfig) -> str:
    if (request.distributed or "").startswith("fsdp"):
        return ": FSDP needs one GPU a process; on CPUs use `specheads recipes accelerate/cpu`"
    return (
        ": on CPUs use `accelerate launch --config_file` with what `specheads recipes accelerate/cpu` prints, or "
        "`torchrun --nproc_per_node N` with training.use_cpu=true; on GPUs accelerate/ddp"
    )


def kind_of(accelerator: Any) -> str:
    """What an Accelerator runs, as one of KINDS."""
    name = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if name == "NO":
        return "no"
    if name == "DEEPSPEED":
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    if name == "FSDP":
        return "fsdp2" if getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) == 2 else "fsdp"
    return "ddp" if name.startswith("MULTI_") else name.lower()


def wait_for_all(state: Any) -> None:
    """Wait until every process is here, and the group can be destroyed. state: an Accelerator or a PartialState.

    A process that ends before others may abort at exit, and the launcher then stops one that is still writing. And
    gloo's thread needs the GIL to release the barrier, while destroying the group waits for that thread holding the
    GIL: a deadlock, unless the thread gets time to take it first.
    """
    state.wait_for_everyone()
    if state.num_processes > 1:
        time.sleep(0.1)


def from_environment(environment: Mapping[str, str]) -> LaunchConfig:
    """What torchrun and `accelerate launch` leave in the environment."""
    size = environment.get("WORLD_SIZE")
    kind = None
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "")
        kind = f"zero{stage}" if stage in ("1", "2", "3") else None  # a DeepSpeed config file names its own stage
    elif environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        kind = "fsdp2" if environment.get("FSDP_VERSION") == "2" else "fsdp"
    return LaunchConfig(int(size) if size and size.isdigit() and int(size) else None, kind)


def from_command(command: Sequence[str]) -> LaunchConfig:
    """The processes that an `accelerate launch` command asks for, by flag or in its configuration file."""
    start = next((i for i, word in enumerate(command) if _launches(word, command[i + 1 : i + 2])), None)
    if start is None:
        return LaunchConfig()
    words = [word.replace("-", "_") if word.startswith("--") else word for word in command[start:]]
    if (flag := _value(words, "__num_processes") or _value(words, "__num_process")) is not None:
        return LaunchConfig(int(flag) if flag.isdigit() and int(flag) else None)
    file = _value(words, "__config_file")
    if file is None or not Path(file).is_file():
        return LaunchConfig()
    import yaml

    options = yaml.safe_load(Path(file).read_text("utf8"))
    number = options.get("num_processes") if isinstance(options, Mapping) else None
    return LaunchConfig(number if type(number) is int and number > 0 else None)


def _launches(word: str, following: Sequence[str]) -> bool:
    """Does `accelerate launch`, in any of its spellings, start at this word?"""
    if Path(word).name == "accelerate":
        return list(following) == ["launch"]
    return Path(word).name in ("accelerate-launch", "accelerate.commands.launch") or word.endswith(
        "accelerate/commands/launch.py"
    )


def _value(words: Sequence[str], flag: str) -> str | None:
    for i, word in enumerate(words):
        if word == flag and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _parent_command() -> list[str]:
    import psutil  # accelerate's own dependency

    try:
        parent = psutil.Process().parent()
        return parent.cmdline() if parent is not None else []
    except psutil.Error:
        return []  # another user's process, or one that just ended
