"""`specheads evaluate`: races a drafter against transformers' generate() and our loop without drafts, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specheads import terminal
from specheads.bench import decoders, environment, report, runner
from specheads.bench.decoders import REFERENCE
from specheads.cli.commands.arguments import parse_tree
from specheads.data.conversation import Conversation
from specheads.decoding.acceptance import Acceptance
from specheads.decoding.acceptance.named import RULES
from specheads.decoding.drafters import Drafter
from specheads.decoding.generation import prompt_batches
from specheads.models.named import Models

_LEGEND = (
    f"speed-up: over {REFERENCE}. accepted length: tokens a step, including the base's own.",
    "same text: as it wrote; no (n): n texts differ. repeated: the last 8 tokens occurred before in the same text.",
)


def measure(
    models: Models, name: str, drafter: Drafter, prompts: Sequence[str | Conversation], *, max_new_tokens: int,
    repeats: int, tree: str | None, rule: Acceptance | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The settings, the environment, and the figures of each decoder. tree: as on the command line.

    The drafter, named `name`, comes last, followed by itself under `rule` if that is given. Of a conversation only the
    first turn is used. Progress goes to stderr."""
    model, tokenizer = models.target, models.tokenizer
    asked = [prompt if isinstance(prompt, str) else prompt.prompt((), tokenizer) for prompt in prompts]
    plan = parse_tree(tree, drafter)
    racers = {
        REFERENCE: decoders.transformers_generate(model, max_new_tokens),
        "our loop, no drafts": decoders.drafted(model, max_new_tokens, draft=False),
        name: decoders.drafted(model, max_new_tokens, draft=drafter, plan=plan),
    }
    if rule is not None:
        own = decoders.drafted(model, max_new_tokens, draft=drafter, plan=plan, accept=rule)
        racers[f"{name}, {RULES.write(rule)}"] = own
    with terminal.progress(terminal.make_console(stderr=True), "measuring") as report_progress:
        batches = prompt_batches.batches(tokenizer, asked, model.device)
        result = runner.race(racers, batches, repeats=repeats, report=report_progress)
    return {
        "num_prompts": len(prompts), "max_new_tokens": max_new_tokens, "repeats": repeats, "tree": tree,
        "dtype": str(model.dtype).removeprefix("torch."), "environment": environment.environment(),
        "decoders": report.summary(result, REFERENCE),
    }  # fmt: skip


def show(record: dict[str, Any]) -> None:
    """Print the record of measure() as tables on stdout."""
    out = terminal.make_console()
    rows = record["decoders"]
    title = (
        f"{record['num_prompts']} prompts × {record['max_new_tokens']} tokens, greedy, median of {record['repeats']}"
    )
    out.print(terminal.table(title, report.COLUMNS, [report.cells(name, row) for name, row in rows.items()]))
    parts = [report.part_cells(name, row) for name, row in rows.items()]
    out.print(terminal.table("New text and text that repeats itself", report.PART_COLUMNS, parts))
    *_, head = rows.values()
    depths = [[f"depth {depth}", f"{share:.1%}"] for depth, share in enumerate(head["accepted_by_depth"], start=1)]
    if depths:
        out.print(terminal.table("Drafts accepted at each depth", ("", "share of steps"), depths))
    for line in _LEGEND:
        out.print(line)
    out.print(environment.line(record["environment"]))
