"""A tiny base with a byte tokenizer, rows of text, and folders of its saved features."""

import json

import torch

from specheads.training.features.extract import save_features
from specheads.training.features.plan import SaveOptions
from specheads.training.recipe.recipe import Recipe
from tests.support.command_line import ship

HEADS = {
    "medusa": {"num_heads": 2, "num_layers": 1},
    "eagle": {"metric_steps": 2, "noise": 0.0},
    "eagle3": {"steps": 2, "draft_vocab_size": 40},
    "hydra": {"num_heads": 2, "num_layers": 1, "prefix_layer": True},
    "mtp": {"steps": 2},
    "parallel": {"block_size": 2, "num_layers": 1, "markov_rank": 4, "draft_vocab_size": 40, "taps": (1, 2, 4)},
}
TAPS = (1, 2, 4)  # what all of them read of a base of four layers


def material(folder):
    """folder/base, and rows of unequal lengths in train.jsonl and eval.jsonl, of whose tokens some are supervised."""
    ship(folder)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 14), ("eval", 5)):
        rows = []
        for length in torch.randint(6, 24, (count,), generator=generator).tolist():
            ids = torch.randint(2, 258, (length,), generator=generator)
            learnt = torch.rand(length, generator=generator) < 0.7
            learnt[-1] = True
            rows.append({"input_ids": ids.tolist(), "labels": torch.where(learnt, ids, -100).tolist()})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe(folder, output, kind="medusa", head=None, data=None, features=None, **training):
    settings = {
        "output_dir": str(output), "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    files = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 24}
    live = {"base": str(folder / "base"), "base_dtype": "float32", "data": {**files, **(data or {})}}
    return Recipe.from_dict(
        {
            **(live if features is None else {"features": str(features)}),
            "head": {"kind": kind, **HEADS[kind], **(head or {})}, "training": {**settings, **training},
            "parity": {"prompts": 0},
        }
    )  # fmt: skip


def dump(folder, output, data=None, ask=None, training=None, **options):
    """Features of folder's base, in files of a few rows."""
    chosen = {"taps": TAPS, "batch_size": 2, "shard_mb": 0.012, **options}
    return save_features(
        recipe(folder, folder / "unused", data=data, **(training or {})), SaveOptions(output, **chosen), ask
    )
