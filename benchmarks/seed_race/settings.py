"""What benchmarks/seeds.py races: for each original the ways in which it is called."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Race:
    """One way of calling a system. caches: with its own KV cache on, without, or both. exact: greedy text is the
    target's own by the rule itself."""

    system: str
    name: str
    setting: dict[str, Any]
    caches: tuple[bool, ...]
    exact: bool


def races(options: Namespace) -> list[Race]:
    """Those of the originals that the options give."""
    gamma, divergence, threshold = options.gamma, options.divergence, options.threshold
    either = (False, True) if options.old else (False,)  # transformers 5 does not have the caches they were written for
    model = {"gamma": gamma, "draft": "model", "sampled": False}
    grams = model | {"draft": "n-grams", "n": 3, "filler_top_k": 3}
    cascade = {"k_matrix": [[5, 10], [0, 10]], "leniency": 3}
    exact = {"gamma": 5, "threshold": None, "divergence": divergence, "sampled": False}  # no other γ is had there
    fuzzy, rule = exact | {"threshold": threshold}, f"{divergence} ≤ {threshold:g}"
    every = {
        "romsto": [
            Race("romsto", f"γ = {gamma}, greedy", model, either, True),
            Race("romsto", f"γ = {gamma}, sampled", model | {"sampled": True}, either, False),
            Race("romsto", f"3-grams, γ = {gamma}, greedy", grams, either, True),
        ],
        "csd": [Race("cs-drafting", "K = [[5, 10], [0, 10]], leniency 3, greedy", cascade, either, True)],
        "fsd": [
            Race("fsd", "exact, γ = 5, greedy", exact, (True,), True),
            Race("fsd", "exact, γ = 5, sampled", exact | {"sampled": True}, (True,), False),
            Race("fsd", f"{divergence} ≤ 0, γ = 5, greedy", exact | {"threshold": 0.0}, (True,), True),
            Race("fsd", f"{rule}, γ = 5, greedy", fuzzy, (True,), False),
            Race("fsd", f"{rule}, γ = 5, sampled", fuzzy | {"sampled": True}, (True,), False),
        ],
        "notebook": [
            Race("notebook", f"γ = {gamma}, k = 1", {"gamma": gamma, "k": 1}, (False,), True),
            Race(
                "notebook", f"γ = {gamma}, k = {options.top_k}", {"gamma": gamma, "k": options.top_k}, (False,), False
            ),
        ],
        "modelopt": [Race("modelopt", f"EAGLE-3, {gamma} drafts, greedy", {"depth": gamma}, (False,), True)],
    }
    return [race for name, of in every.items() if getattr(options, name) for race in of]
