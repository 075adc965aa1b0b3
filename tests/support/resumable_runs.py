"""Runs on saved features that save every second step and resume from the last checkpoint."""

import json

from tests.support.saved_features import recipe


def options(output, folder, **training):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "resume_from_checkpoint": "auto"}
    return recipe(folder, output, features=folder / "saved", **{**saving, **training})


def losses(output):
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
