"""Drafts accepted by a server beside decoding here with the same head and prompts: equal up to chance, or why not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specheads.audit.clients.client import Answer, CountingClient
from specheads.audit.settings import Settings
from specheads.decoding.planner import chain
from specheads.decoding.results import POSITIONS, AcceptanceCounts
from specheads.training.parity import decode_counted

COMPARED, TOKENS = 16, 128  # prompts, and tokens of each text: two ranges of output positions
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
    the server does not say what it drafted. ValueError unless the settings are greedy without penalties.

    A server counts whole texts. So each is asked for up to the end of each range of output positions, and the
    difference of two ends is of the range between them.
    """
    if not settings.greedy or settings.penalised:
        raise ValueError(f"{settings}: acceptance is compared in greedy text without penalties")
    ends = [*(start for start in POSITIONS if 0 < start < settings.max_tokens), settings.max_tokens]
    asked, there = [replace(settings, max_tokens=end) for end in ends], []
    for way in asked:
        if (told := count_there(client, prompts, way)) is None:
            return None
        there.append(told)
    here = [decode_here(model, prompts, way, there[-1][1]) for way in asked]
    whole = Comparison(there[-1][0], here[-1])
    ranges = {0: Comparison(there[0][0], here[0])} | {
        end: Comparison(there[i + 1][0] - there[i][0], here[i + 1] - here[i]) for i, end in enumerate(ends[:-1])
    }
    known = {start: part for start, part in ranges.items() if min(part.server.steps, part.ours.steps) > 0}
    return replace(whole, by_position=known if len(ends) > 1 else {})


def count_there(
    client: CountingClient, prompts: Sequence[list[int]], settings: Settings
) -> tuple[AcceptanceCounts, int] | None:
    """What the server accepted in its text of these prompts, and how many tokens it drafts a step."""
    before = client.counters()
    answers = client.ask(prompts, settings)
    after = client.counters()
    if before is not None and after is not None and after.steps > before.steps:
        counted = after - before  # with drafts past the end of a text, which are not written
        written = sum(len(a.tokens) - 1 for a in answers)
        return AcceptanceCounts(counted.steps, written, counted.by_depth), max(len(counted.by_depth), 1)
    if (told := of_answers(answers)) is not None and told.steps:
        depth = len(told.by_depth) or math.ceil(sum(a.drafted or 0 for a in answers) / told.steps)
        return told, max(depth, 1)
    return None


def of_answers(answers: Sequence[Answer]) -> AcceptanceCounts | None:
    """Where each answer says it. The first token of a text is no step; None if nothing was drafted."""
    counts = [
        AcceptanceCounts(len(a.tokens) - 1 - a.accepted, len(a.tokens) - 1, a.by_depth)
        for a in answers if a.accepted is not None and a.drafted
    ]  # fmt: skip
    return sum(counts, AcceptanceCounts()) if counts else None


def decode_here(model: Any, prompts: Sequence[list[int]], settings: Settings, depth: int) -> AcceptanceCounts:
    """Greedy chains of the model's own head, to max_tokens or the end of each text: the figure of the parity gate."""
    counts = AcceptanceCounts(by_depth=(0,) * depth)
    for prompt in prompts:
        counts += decode_counted(model, prompt, tree=chain(depth), **settings.generate_options())[0]
    return counts


@dataclass(frozen=True)
class Comparison:
    """The server's acceptance beside ours, and by_position: the first of a range of output positions → that range's."""

    server: AcceptanceCounts
    ours: AcceptanceCounts
    by_position: Mapping[int, Comparison] = field(default_factory=dict)

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
        """Over all, and in each range of output positions."""
        return abs(self.errors) <= ERRORS and all(part.equal for part in self.by_position.values())

    def __str__(self) -> str:
        lines = [f"accepted there: {self.server}", f"accepted here: {self.ours}"]
        lines += [
            f"from output position {start}: {part.server.tokens_per_step:.3f} tokens a step there, "
            f"{part.ours.tokens_per_step:.3f} here"
            for start, part in self.by_position.items()
        ]
        return "\n".join([*lines, *self.words()])

    def words(self) -> list[str]:
        """How far apart they are, and the likely causes."""
        if self.equal:
            return [f"the same within {ERRORS:g} standard errors"]
        parts = {"": self} | {f" from output position {start}": part for start, part in self.by_position.items()}
        apart = [f"{abs(part.errors):.1f}{where}" for where, part in parts.items() if abs(part.errors) > ERRORS]
        return [
            f"standard errors apart: {', '.join(apart)}; check in this order:",
            *(f"  {i}. {cause}" for i, cause in enumerate(CAUSES, 1)),
        ]

    def to_dict(self) -> dict[str, Any]:
        sides = {"server": self.server, "here": self.ours}
        figures = {
            name: {"tokens_per_step": a.tokens_per_step, "steps": a.steps, "by_depth": list(a.by_depth)}
            for name, a in sides.items()
        }
        parts = {str(start): part.to_dict() for start, part in self.by_position.items()}
        errors = self.errors if math.isfinite(self.errors) else None
        return {**figures, "standard_errors": errors, "equal": self.equal} | ({"by_position": parts} if parts else {})
