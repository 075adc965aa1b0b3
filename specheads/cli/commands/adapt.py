"""`specheads adapt`: fit a head to its user's sessions, and say what that changed."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

from transformers.utils import logging as hf_logging

from specheads import terminal
from specheads.cli.app import emit, output
from specheads.cli.errors import say
from specheads.cli.hanging import print_hanging
from specheads.cli.options.training import AdaptCommand
from specheads.training.adapt import run as work
from specheads.training.errors import TrainingError

WORSE = 3  # exit code


def run(options: AdaptCommand) -> int:
    if options.dry_run:
        output(work.plan(options), show_plan, options.as_json)
        return 0
    hf_logging.disable_progress_bar()
    console = terminal.make_console(stderr=True)
    try:
        with redirect_stdout(sys.stderr) if options.as_json else nullcontext():
            record = work.adapt(options, lambda what: terminal.progress(console, what))
    except TrainingError as error:
        say("specheads", str(error))
        return 1
    if options.as_json:
        emit(record)
    else:
        show(record)
    return WORSE if record["after"] < record["before"] else 0


def show_plan(plan: dict[str, Any]) -> None:
    domains = f", in {len(plan['domains'])} domains: {', '.join(plan['domains'])}" if len(plan["domains"]) > 1 else ""
    print(f"measure on {plan['held_out']:,} held-out sessions{domains}" + (" and on other text" if plan["old"] else ""))
    if plan["without_answer"]:
        print(f"have the base answer {plan['without_answer']:,} of {plan['train']:,} sessions to train on")
    what = "the whole head" if plan["rank"] is None else f"low-rank adapters (rank {plan['rank']})"
    tokens = "" if plan["tokens"] is None else f", {plan['tokens']:,.0f} tokens"
    print_hanging(
        f"train {what} on {plan['train']:,} sessions, until {plan['minutes']:g} minutes{tokens} or {plan['epochs']} "
        "epochs are over", 0,
    )  # fmt: skip
    print(f"measure again, on the same texts, and write {plan['output']}")


def show(record: dict[str, Any]) -> None:
    rows = [
        [domain, str(one["prompts"]), f"{one['before']:.2f}", f"{one['after']:.2f}", work.change(one)]
        for domain, one in record["domains"].items()
    ]
    columns = ("", "prompts", "before", "after", "change")
    shown = terminal.table("Tokens a step, on the same greedy texts", columns, rows)
    terminal.print_table(terminal.make_console(), shown)
    print(f"trained on {record['tokens']:,} tokens in {record['steps']:,} steps, {record['minutes']:g} minutes")
    print(f"saved {record['written']}" + (f", and {record['served']}: {record['form']}" if "served" in record else ""))
    if "not_served" in record:
        print_hanging(record["not_served"], 0)
    if record["after"] < record["before"]:
        print_hanging(
            "the sessions are accepted less than before: keep the old head, or give more sessions or a lower "
            "--learning-rate", 0,
        )  # fmt: skip
