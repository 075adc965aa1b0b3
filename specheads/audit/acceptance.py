"""Drafts accepted by a server beside decoding here with the same head and prompts: equal up to chance, or why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specheads.audit.clients.client import Answer, CountingClient
from specheads.audit.settings import Settings
from specheads.decoding.planner import chain
from specheads.decoding.results import AcceptanceCounts
from specheads.training.parity import decode_counted

COMPARED = 16  # prompts
ERRORS = 2.0  # standard errors apart that are said

CAUSES = (
    "the layers whose hidden states the server gives the head (off by one: see docs/serving.md)",
    "a norm that the server leaves out or adds (norm_before_residual, norm_before_fc, norm_features, norm_output)",
    "the head's rotary positions, or its draft vocabulary (d2t)",
    "another chat template, or a BOS token, than the head was trained with",
    "the attention window of the head, where prompts are longer than it",
    "the dtype or quantisation of base and head",
)


def compare(client: CountingClient, model: Any, prompts: Sequence[list[int]], settings: Settings) -> Comparison | None:
    """The server's greedy text of these prompts and ours by the model's head, a chain as deep as the server's; None if
    the server does not say what it drafted. ValueError unless the settings are greedy without penalties."""
    if not settings.greedy or settings.penalised:
        raise ValueError(f"{settings}: acceptance is compared in greedy text without penalties")
    before = client.counters()
    answers = client.ask(prompts, settings)
    after = client.counters()
    if before is not None and after is not None and after.steps > before.steps:
        counted = after - before  # with drafts past the end of a text, which are not written
        written = sum(len(a.tokens) - 1 for a in answers)
        server = AcceptanceCounts(counted.steps, written, counted.by_depth)
        depth = len(counted.by_depth)
    elif (told := of_answers(answers)) is not None and told.steps:
        server = told
        depth = math.ceil(sum(a.drafted or 0 for a in answers) / told.steps)
    else:
        return None
    return Comparison(server, decode_here(model, prompts, settings, max(depth, 1)))


def of_answers(answers: Sequence[Answer]) -> AcceptanceCounts | None:
    """Where each answer says it. The first token of a text is no step; None if nothing was drafted."""
    known = [(len(a.tokens) - 1, a.accepted) for a in answers if a.accepted is not None and a.drafted]
    tokens = sum(written for written, _ in known)
    return AcceptanceCounts(tokens - sum(accepted for _, accepted in known), tokens) if known else None


def decode_here(model: Any, prompts: Sequence[list[int]], settings: Settings, depth: int) -> AcceptanceCounts:
    """Greedy chains of the model's own head, to max_tokens or the end of each text: the figure of the parity gate."""
    counts = AcceptanceCounts(by_depth=(0,) * depth)
    for prompt in prompts:
        counts += decode_counted(model, prompt, tree=chain(depth), **settings.generate_options())[0]
    return counts


@dataclass(frozen=True)
class Comparison:
    """The server's acceptance beside ours."""

    server: AcceptanceCounts
    ours: AcceptanceCounts

    @property
    def errors(self) -> float:
        """How many standard errors the server's tokens a step are above ours. A step accepts 0 to depth tokens; its
        variance is that of ours, by depth: Var = Σ (2d - 1) P(at least d) - mean²."""
        steps = self.ours.steps
        mean = sum(self.ours.by_depth) / max(steps, 1)
        square = sum((2 * d - 1) * n for d, n in enumerate(self.ours.by_depth, 1)) / max(steps, 1)
        error = math.sqrt(max(square - mean**2, 0.0) * (1 / max(steps, 1) + 1 / max(self.server.steps, 1)))
        apart = self.server.tokens_per_step - self.ours.tokens_per_step
        return apart / error if error else math.copysign(math.inf, apart) if apart else 0.0

    @property
    def equal(self) -> bool:
        return abs(self.errors) <= ERRORS

    def __str__(self) -> str:
        lines = [f"accepted there: {self.server}", f"accepted here: {self.ours}"]
        if self.equal:
            return "\n".join([*lines, f"the same within {ERRORS:g} standard errors"])
        lines.append(f"{abs(self.errors):.1f} standard errors apart; check in this order:")
        return "\n".join([*lines, *(f"  {i}. {cause}" for i, cause in enumerate(CAUSES, 1))])

    def to_dict(self) -> dict[str, Any]:
        sides = {"server": self.server, "here": self.ours}
        figures = {
            name: {"tokens_per_step": a.tokens_per_step, "steps": a.steps, "by_depth": list(a.by_depth)}
            for name, a in sides.items()
        }
        return {**figures, "standard_errors": self.errors if math.isfinite(self.errors) else None, "equal": self.equal}
