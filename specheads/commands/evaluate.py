"""`specheads evaluate`: a head raced against transformers' generate() and our loop without drafts, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specheads import console as terminal
from specheads.accept import Acceptance
from specheads.accept.named import rule_text
from specheads.bench import decoders, environment, report, runner
from specheads.bench.decoders import REFERENCE
from specheads.commands.arguments import parse_tree
from specheads.conversation import Conversation
from specheads.spec_model import SpecModel


def measure(
    model: SpecModel, tokenizer: Any, prompts: Sequence[str | Conversation], *, max_new_tokens: int, repeats: int,
    tree: str | None, rule: Acceptance | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What was asked for, where it ran, and the figures of each decoder; tree as on the command line. The head's come
    last, and where there is a `rule` once more under that. Of a conversation the first turn is asked. Progress goes to
    stderr."""
    asked = [prompt if isinstance(prompt, str) else prompt.prompt((), tokenizer) for prompt in prompts]
    plan, head = parse_tree(tree, model), f"{model.head.config.kind} head"
    racers = {
        REFERENCE: decoders.transformers_generate(model.base, max_new_tokens),
        "our loop, no drafts": decoders.drafted(model, max_new_tokens, draft=False),
        head: decoders.drafted(model, max_new_tokens, plan=plan),
    }
    if rule is not None:
        racers[f"{head}, {rule_text(rule)}"] = decoders.drafted(model, max_new_tokens, plan=plan, accept=rule)
    with terminal.progress(terminal.make_console(stderr=True), "measuring") as told:
        batches = decoders.batches(tokenizer, asked, model.device)
        result = runner.race(racers, batches, repeats=repeats, report=told)
    return {
        "num_prompts": len(prompts), "max_new_tokens": max_new_tokens, "repeats": repeats, "tree": tree,
        "dtype": str(model.dtype).removeprefix("torch."), "environment": environment.environment(),
        "decoders": report.summary(result, REFERENCE),
    }  # fmt: skip


def show(record: dict[str, Any]) -> None:
    """What measure() gave, as tables on stdout."""
    out = terminal.make_console()
    rows = record["decoders"]
    title = (
        f"{record['num_prompts']} prompts × {record['max_new_tokens']} tokens, greedy, median of {record['repeats']}"
    )
    out.print(terminal.table(title, report.COLUMNS, [report.cells(name, row) for name, row in rows.items()]))
    parts = [report.part_cells(name, row) for name, row in rows.items()]
    out.print(terminal.table("New text and text that repeats itself", report.PART_COLUMNS, parts))
    *_, head = rows.values()
    depths = enumerate(head["accepted_by_depth"], start=1)
    out.print("accepted at depth " + ", ".join(f"{depth}: {share:.0%}" for depth, share in depths))
    out.print(environment.line(record["environment"]))
