"""Our side of benchmarks/seeds.py: for each original's setting the same through `specheads.generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import specheads
from seed_race.theirs import Job, Result, Setting, Side
from specheads import Cascade, DraftModel, Exact, Fuzzy, MaxGram, NGram, NGramStorage, SampledTree, Step, chain
from specheads.models.convert import load_head

DIVERGENCES = {"js_div": "js_paper", "kl_div": "kl", "kl_div_reversed": "kl_reversed", "tv_div": "tv"}


class Ours(Side):
    def run(self, prompt: list[int], count: int, **options: Any) -> tuple[list[int], Any]:
        """The new ids, and the steps they came in."""
        ids = torch.tensor([prompt])
        out: Any = specheads.generate(
            self.target, ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, return_dict_in_generate=True,
            seed=torch.initial_seed(), **options,
        )  # fmt: skip
        return out.sequences[0, len(prompt) :].tolist(), out.steps

    def with_draft(self, prompt: list[int], count: int, gamma: int, sampled: bool, **options: Any) -> Any:
        plan = SampledTree((1,) * gamma) if sampled else chain(gamma)
        sampling = {"do_sample": True, "top_k": 0, **options} if sampled else {"do_sample": False, **options}
        return self.run(prompt, count, draft=DraftModel(self.draft), tree=plan, **sampling)


class Romsto(Ours):
    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        if setting["draft"] == "model":
            ids, steps = self.with_draft(prompt, count, setting["gamma"], setting["sampled"])
        else:
            storage = NGramStorage(setting["n"], self.target.config.vocab_size)
            drafter = NGram(
                setting["gamma"], storage=storage, filler_top_k=setting["filler_top_k"], stop_if_unknown=False
            )
            ids, steps = self.run(prompt, count, draft=drafter, do_sample=False)
        return ids, share_accepted(steps, count)


class CSDrafting(Ours):
    def __init__(self, job: Job, load: Callable[[str], Any]) -> None:
        super().__init__(job, load)
        self.bigrams = tuple(json.loads(Path(job["bigrams"]).read_text()))

    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        drafts = [DraftModel(self.draft), MaxGram(bigrams=self.bigrams)]
        cascade = Cascade(drafts, setting["k_matrix"], leniency=setting["leniency"])
        return self.run(prompt, count, draft=cascade, do_sample=False)[0], None


class FSD(Ours):
    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        threshold = setting["threshold"]
        rule = Exact() if threshold is None else Fuzzy(threshold, DIVERGENCES[setting["divergence"]])
        ids, steps = self.with_draft(prompt, count, setting["gamma"], setting["sampled"], accept=rule)
        return ids, share_accepted(steps, count)


class Notebook(Ours):
    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        top_k = {"top_k": setting["k"]} if setting["k"] > 1 else {}
        ids, steps = self.with_draft(prompt, count, setting["gamma"], setting["k"] > 1, **top_k)
        return ids, accepted_and_drafted(steps, count)[0] / len(ids)


class ModelOpt(Ours):
    """The same head, in our loop."""

    def __init__(self, job: Job, load: Callable[[str], Any]) -> None:
        super().__init__(job, load)
        self.head = load_head(self.target, job["own_head"], dtype=torch.float32).eval().head

    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        ids, steps = self.run(prompt, count, draft=self.head, tree=chain(setting["depth"]), do_sample=False)
        accepted = accepted_and_drafted(steps, count)[0]
        return ids, 1 + accepted / max(1, len(steps) - 1)


OURS: dict[str, type[Side]] = {
    "romsto": Romsto, "cs-drafting": CSDrafting, "fsd": FSD, "notebook": Notebook, "modelopt": ModelOpt,
}  # fmt: skip


def accepted_and_drafted(steps: Sequence[Step], limit: int) -> tuple[int, int]:
    """Of a text of at most `limit` new tokens: how many of its tokens were drafted, and how many were drafted for it.
    Its last token is the target's own unless something ends it earlier."""
    accepted = drafted = 0
    length = len(steps[0].tokens[0])
    for step in steps[1:]:
        room = limit - length - 1
        accepted += min(step.accepted[0], room)
        drafted += min(step.drafted[0], room)
        length += len(step.tokens[0])
    return accepted, drafted


def share_accepted(steps: Any, count: int) -> float:
    accepted, drafted = accepted_and_drafted(steps, count)
    return accepted / drafted if drafted else 0.0
