"""`specheads evaluate`: races a drafter, greedily, against transformers' generate() and our loop without drafts."""

from __future__ import annotations

from functools import partial
from typing import Any

from specheads import terminal
from specheads.bench import decoders, environment, report, runner
from specheads.bench.batches import batch_by_batch
from specheads.bench.decoders import REFERENCE
from specheads.bench.prompts import held_out_prompts, prompts_from
from specheads.cli.app import output
from specheads.cli.options.measure import EvaluateOptions
from specheads.decoding.acceptance import RULES, rule_named
from specheads.decoding.generation import prompt_batches
from specheads.decoding.planner import as_plan
from specheads.models.named import Models

_LEGEND = (
    "tokens/s: each prompt batch counts with its median over the repeats.",
    f"speed-up: over {REFERENCE}. 95 %: of it, by resampling the prompt batches; rough if they are few, none for one.",
    "accepted length: tokens a step, including the base's own.",
    "same text: as it wrote; no (n): n texts differ. repeated: the last 8 tokens occurred before in the same text.",
)


def run(options: EvaluateOptions) -> None:
    output(measure(options), show, options.as_json)


def measure(options: EvaluateOptions) -> dict[str, Any]:
    """The settings, the environment, and the figures of each decoder. With several prompts at a time our decoders take
    the next prompt when a row ends, while generate() runs batch by batch.

    The drafter comes last, followed by itself with --accept if that is given. Only the first turn of a conversation is
    used. Progress goes to stderr."""
    rule = None if options.accept is None else rule_named(options.accept)
    prompts: Any = None
    if options.prompts:
        prompts = prompts_from(options.prompts, options.num_prompts, chat=options.chat)
    models = Models.load(options.model, base=options.base, dtype=options.dtype, device=options.device)
    name, drafter = models.choose(options.draft)
    assert name is not None and drafter is not None
    model, tokenizer = models.target, models.tokenizer
    if prompts is None:
        prompts = held_out_prompts(tokenizer, options.num_prompts or 8)
    texts = [prompt if isinstance(prompt, str) else prompt.prompt((), tokenizer) for prompt in prompts]
    size, length, plan = options.batch_size, options.max_new_tokens, as_plan(options.tree, drafter)
    ours = partial(decoders.specheads_generate, model, length, batch_size=size if size > 1 else None)
    racers = {
        REFERENCE: batch_by_batch(decoders.transformers_generate(model, length), size),
        "our loop, no drafts": ours(draft=False),
        name: ours(draft=drafter, plan=plan),
    }
    if rule is not None:
        racers[f"{name}, {RULES.write(rule)}"] = ours(draft=drafter, plan=plan, accept=rule)
    with terminal.progress(terminal.make_console(stderr=True), "measuring") as report_progress:
        side = "right" if model.config.is_encoder_decoder else "left"
        rows = 1 if size == 1 else len(texts)  # all in one queue
        batches = prompt_batches.batches(tokenizer, texts, model.device, rows, side=side)
        result = runner.race(racers, batches, repeats=options.repeats, report=report_progress)
    return {
        **options.record(), "num_prompts": len(texts), "dtype": str(model.dtype).removeprefix("torch."),
        "environment": environment.environment(), "decoders": report.summary(result, REFERENCE),
    }  # fmt: skip


def show(record: dict[str, Any]) -> None:
    """Print the record of measure() as tables on stdout."""
    out = terminal.make_console()
    rows = record["decoders"]
    batch = f", {record['batch_size']} at a time" if record["batch_size"] > 1 else ""
    title = (
        f"{record['num_prompts']} prompts × {record['max_new_tokens']} tokens{batch}, greedy, median of "
        f"{record['repeats']}"
    )
    cells = [report.cells(name, row) for name, row in rows.items()]
    terminal.print_table(out, terminal.table(title, report.COLUMNS, cells))
    parts = [report.part_cells(name, row) for name, row in rows.items()]
    if record["batch_size"] == 1:  # in a batch, a step's time is that of all rows
        terminal.print_table(out, terminal.table("New text and text that repeats itself", report.PART_COLUMNS, parts))
    *_, head = rows.values()
    shares = enumerate(head["accepted_by_depth"] or (), start=1)
    depths = [[f"depth {depth}", f"{share:.1%}"] for depth, share in shares]
    if depths:
        terminal.print_table(out, terminal.table("Drafts accepted at each depth", ("", "share of steps"), depths))
    for line in _LEGEND:
        out.print(line)
    out.print(environment.line(record["environment"]))
