"""The options of demo, recipes, features, train and curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specheads.cli.complete import complete_recipe
from specheads.cli.options.shared import OVERRIDES, RECIPE, Output
from specheads.options import OptionError, argument, option
from specheads.training.adapt.options import AdaptOptions


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Output):
    """Train a head in minutes, and race it.

    It trains until held-out text accepts 2 tokens a pass, is saved, restored, and raced against plain decoding, prompt
    lookup and "auto". If no base came with the package, a tiny one is trained first, in a few minutes.

    \b
    Examples:
      specheads demo
      specheads demo --minutes 5
      specheads demo --json > figures.json
    """

    minutes: float = option(3.0, "Minutes of live training, at most.", min=0.01)
    checkpoints: Path | None = option(None, "Folder of base/ and the heads (default: shipped).")
    output: Path = option(Path("runs/demo"), "Folder for the trained head.")


@dataclass(frozen=True, kw_only=True)
class RecipesOptions(Output):
    """List the recipes that come with specheads, or print one.

    They are for train, features, bench and accelerate launch.

    \b
    Examples:
      specheads recipes
      specheads recipes eagle3 > my.yaml
      accelerate launch \\
        --config_file "$(specheads recipes accelerate/ddp --path)" -m specheads \\
        train eagle3
    """

    name: str | None = argument("[NAME]", "Recipe to print.", None, autocompletion=complete_recipe(None))
    path: bool = option(False, "Print the path of its file instead.")

    def __post_init__(self) -> None:
        if self.path and self.name is None:
            raise OptionError("{path}: give the NAME of a recipe too", path=True)
        if self.path and self.as_json:
            raise OptionError("{path} and {as_json}: give one of them", path=True, as_json=True)


@dataclass(frozen=True, kw_only=True)
class FeaturesOptions(Output):
    """Save what a base computes on a recipe's data.

    `specheads train RECIPE features=DIR` then trains on it, without the base. A stopped run resumes where it was. On
    several GPUs: accelerate launch train/features.py RECIPE.

    \b
    Examples:
      specheads features eagle3 --output features/llama data.train=my.jsonl
      specheads features eagle3 --output features/small --dtype float8_e4m3fn \\
        --teacher-probs 64 --yes
    """

    recipe: str = argument("RECIPE", RECIPE, recipes="train")
    overrides: list[str] | None = argument("[KEY=VALUE]...", OVERRIDES, None)
    output: Path = option(Path("features"), "Folder for the features; one left by a stopped run is resumed.")
    taps: str | None = option(None, "Layers to save: 2,16,29 (default: those the recipe's head reads).")
    dtype: str = option("auto", "bfloat16, float16, float32, float8_e4m3fn; auto: the dtype of the base.")
    teacher_probs: str = option(
        "hidden",
        "What is saved of the base's probabilities: hidden (its last state), a number of likeliest tokens (and the "
        "rest as one), or none.",
    )
    batch_size: int = option(8, "Rows per forward pass.")
    shard_mb: float = option(512, "Approximate size of a file in megabytes.")
    yes: bool = option(False, "Do not ask for confirmation before writing.")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Output):
    """Train a draft head from a recipe.

    It runs in this process or, under `accelerate launch`, in one process per GPU. An option of the recipe may also be a
    flag: --learning-rate 1e-4 is training.learning_rate=1e-4.

    \b
    Examples:
      specheads train eagle3 base=my/model
      specheads train medusa base=Qwen/Qwen3-0.6B data.train=my.jsonl \\
        training.output_dir=out
      specheads train eagle3 --dry-run launch.processes=8 launch.distributed=fsdp2
      specheads train eagle3 base=my/model data.train=chats.jsonl --show-mask 100
      accelerate launch -m specheads train my.yaml
    """

    recipe: str = argument("RECIPE", RECIPE, recipes="train")
    overrides: list[str] | None = argument("[KEY=VALUE]...", OVERRIDES, None)
    dry_run: bool = option(
        False, "Estimate the memory, steps and time of the run, with the recipe's launch section, print them and exit."
    )
    show_mask: int | None = option(
        None, "Print N random rows to train on, with what is learnt marked, and exit.", metavar="N", min=1
    )

    def __post_init__(self) -> None:
        for override in self.overrides or []:
            if "=" not in override:
                raise ValueError(f"{override!r} is not KEY=VALUE, such as training.max_steps=100")


@dataclass(frozen=True, kw_only=True)
class AdaptCommand(AdaptOptions, Output):
    __doc__ = AdaptOptions.__doc__


@dataclass(frozen=True, kw_only=True)
class CurvesOptions(Output):
    """Draw the accepted length of training runs in one figure.

    It is drawn by supervised tokens seen and by CPU time. Bands are 95 % intervals over the batches that were counted:
    of the held-out rows where a run was evaluated, else of the training batches. Runs are named at the ends of their
    lines.

    \b
    Examples:
      specheads curves runs/eagle3 runs/medusa --out compare.png
      specheads curves runs/* --json > figures.json
    """

    runs: list[Path] = argument("RUN...", "Folders of training runs.")
    out: Path = option(Path("curves.png"), "Picture to write.")
