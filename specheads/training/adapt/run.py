"""Adapting a head, stage by stage: split, measure, the base's answers, training, measure again, write."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import set_seed

from specheads.data.batches import Collator
from specheads.decoding.probs.precision import bfloat16_is_fast
from specheads.hub import hub_options
from specheads.models.base.loading import placement, settle_dtype, stop_ids
from specheads.models.card import TrainingRecord
from specheads.models.checkpoint import in_dtype
from specheads.models.convert import load_head
from specheads.models.files import CheckpointError
from specheads.models.formats.export.exporting import engines_for, form_for
from specheads.models.formats.importing import find_foreign
from specheads.models.named import tokenizer_of
from specheads.models.spec_model import SpecModel
from specheads.terminal import Report
from specheads.training.adapt import low_rank
from specheads.training.adapt.budget import Budget
from specheads.training.adapt.measure import Measured, accepted_length, measure, together
from specheads.training.adapt.options import AdaptOptions
from specheads.training.adapt.sessions import (
    Prompt,
    Session,
    domain_of,
    has_answer,
    prompts,
    read_sessions,
    split,
    token_rows,
)
from specheads.training.adapt.work import Work, stage
from specheads.training.build import refuse_without_targets, resume_point, training_arguments
from specheads.training.distributed.launch import refuse_several
from specheads.training.recipe.loading import padding_id
from specheads.training.recipe.recipe import Recipe
from specheads.training.report import card as run_card
from specheads.training.run import Run
from specheads.training.self_distill import run as self_distill
from specheads.training.self_distill.options import Options as DistillOptions
from specheads.training.trainer.trainer import SpecTrainer

OLD = "old"  # the domain of rows of other text
SERVED = "served"  # OUTPUT's folder for the format in which the head came
EPOCHS = 4  # over the sessions, at most
BATCH = 4  # rows of a step
Progress = Callable[[str], contextlib.AbstractContextManager[Report]]


def plan(options: AdaptOptions) -> dict[str, Any]:
    """What adapt() would do, as counts; neither base nor head is loaded."""
    train, held_out = split(read_sessions(options.data), options.held_out, options.seed)
    return {
        "train": len(train), "without_answer": sum(not has_answer(row) for row in train), "held_out": len(held_out),
        "domains": sorted({domain_of(row) for row in held_out}), "old": options.old, "rank": options.rank,
        "minutes": options.minutes, "tokens": options.tokens, "epochs": EPOCHS, "output": str(options.output),
    }  # fmt: skip


def adapt(options: AdaptOptions, progress: Progress) -> dict[str, Any]:
    """Adapt the head, or resume → a record: figures before and after, what was trained on, and what was written.

    Raises ValueError, OSError or ImportError for bad input and TrainingError as training does; KeyboardInterrupt says
    in which stage it was stopped.
    """
    refuse_several()
    train, held_out = split(read_sessions(options.data), options.held_out, options.seed)
    work = Work(options)
    model, tokenizer, stored = _load(options)
    asked = _questions(options, held_out, tokenizer)

    def measured(name: str, model: SpecModel) -> Measured:
        if (known := work.read(name)) is not None:
            return known
        with stage(f"while measuring {name} training"), progress(f"measuring {name} training") as report:
            result = measure(model, asked, options.max_new_tokens, report)
        work.write(name, result)
        return result

    before = measured("before", model)
    if (spent := work.read("trained")) is None:
        rows = _rows(work, train, options, model, tokenizer)
        spent = _train(work, rows, options, model, padding_id(tokenizer))
        model.head.to(stored)
        model.save_pretrained(options.output)
        work.write("trained", spent)
    else:
        model = load_head(model.base, options.output, dtype="auto")
    in_dtype(model.head, model.base.dtype)  # what is measured is what was saved, rounded to its dtype
    after = measured("after", model)
    record = _record(before, after) | {**spent, "written": str(options.output)}
    known = TrainingRecord.of_folder(options.output)
    run_card.write(options.output, model, replace(known, trained=[card_section(record)]))
    record |= _serve(options, model, stored)
    work.write("record", record)
    return record


def _load(options: AdaptOptions) -> tuple[SpecModel, Any, torch.dtype]:
    """Head and base as `--dtype auto` places them, the base's tokenizer, and the dtype in which the head came."""
    _, device = placement("auto", "auto")
    model: Any = SpecModel.from_pretrained(options.head, base=options.base, dtype="auto")
    stored = model.head.dtype
    settle_dtype(model.base, device)
    in_dtype(model.head, model.base.dtype)
    return model.to(device), tokenizer_of(options.base or model.base.name_or_path), stored


def _questions(options: AdaptOptions, held_out: list[Session], tokenizer: Any) -> list[Prompt]:
    """The prompts of held-out sessions and, evenly spaced, of the old rows."""
    room = options.max_length - options.max_new_tokens
    asked = prompts(held_out, tokenizer, room)
    if not asked:
        raise ValueError(f"none of the {len(held_out)} held-out sessions of {', '.join(options.data)} has a prompt")
    if options.old:
        old = read_sessions(options.old)
        count = min(options.held_out, len(old))
        asked += prompts([old[at * len(old) // count] for at in range(count)], tokenizer, room, OLD)
    return asked


def _rows(
    work: Work, train: list[Session], options: AdaptOptions, model: SpecModel, tokenizer: Any
) -> list[dict[str, Any]]:
    """The rows to train on, as token ids: answers that are there, and the base's own where none is."""
    base: Any = model.base
    stops = stop_ids(base.name_or_path, base.config.get_text_config(decoder=True), tokenizer,
                     **hub_options(base.name_or_path))  # fmt: skip
    rows, dropped = token_rows([row for row in train if has_answer(row)], tokenizer, options.max_length, stops)
    if silent := [row for row in train if not has_answer(row)]:
        names = ("messages", "prompt", "tools")
        questions = [{name: row[name] for name in names if row.get(name)} for row in silent]
        source, own = work.write_rows("questions.jsonl", questions), work.folder / "answers.jsonl"
        with stage("while the base answers"):
            self_distill.run(
                DistillOptions(
                    base=base.name_or_path, source=str(source), output=str(own), max_length=options.max_length,
                    max_new_tokens=options.max_new_tokens, seed=options.seed,
                    dtype=str(base.dtype).removeprefix("torch."),
                )
            )  # fmt: skip
        rows += [json.loads(line) for line in own.read_text("utf8").splitlines()]
    if not rows:
        raise ValueError(f"none of the {len(train)} sessions can be learnt from: {dropped}")
    if dropped.total:
        work.write("left_out", str(dropped))
    refuse_without_targets(rows)
    return rows


def _recipe(options: AdaptOptions, base: Any, rows: Path) -> Recipe:
    """The run as a recipe, which its card shows."""
    return Recipe.from_dict(
        {
            "base": base.name_or_path, "init_from": options.head, "parity": {"prompts": 0},
            "data": {"train": str(rows), "max_length": options.max_length},
            "training": {
                "output_dir": str(options.output), "learning_rate": options.learning_rate, "seed": options.seed,
                "lr_scheduler_type": "constant", "num_train_epochs": EPOCHS, "max_grad_norm": 0.5,
                "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "adam_beta2": 0.95,
                "bf16": bfloat16_is_fast(base.device), "eval_strategy": "no", "report_to": "none",
                "logging_steps": 10, "save_steps": 50, "save_total_limit": 1, "resume_from_checkpoint": "auto",
                "include_num_input_tokens_seen": "non_padding", "train_sampling_strategy": "group_by_length",
            },
        }
    )  # fmt: skip


def _train(
    work: Work, rows: list[dict[str, Any]], options: AdaptOptions, model: SpecModel, padding: int
) -> dict[str, Any]:
    """Train the head until the budget is spent → what it took. The head is saved, with the run's curves."""
    recipe = _recipe(options, model.base, work.write_rows("rows.jsonl", rows))
    arguments, checkpoint = training_arguments(recipe), resume_point(recipe)
    set_seed(options.seed)
    model.head.float()
    budget = Budget(60 * options.minutes, options.tokens or math.inf, work.folder / "spent.json")
    callbacks: list[Any] = [budget]
    if options.rank is not None:
        callbacks.append(low_rank.Merged(model, low_rank.attach(model.head, options.rank)))
    trainer = SpecTrainer(
        model, arguments, train_dataset=datasets.Dataset.from_list(rows), data_collator=Collator(padding),
        callbacks=callbacks,
    )  # fmt: skip
    trainer.recipe = recipe.to_yaml()
    trainer.lr_scheduler = LambdaLR(trainer.create_optimizer(), budget.factor)
    run = Run(trainer, checkpoint, recipe)
    with stage("in training"):
        run.train()
    return {"rows": len(rows), "steps": trainer.state.global_step, "minutes": round(budget.taken() / 60, 2),
            "tokens": int(trainer.state.num_input_tokens_seen)}  # fmt: skip


def _record(before: Measured, after: Measured) -> dict[str, Any]:
    """Tokens a step before and after: over the sessions, by domain, and of the old rows."""
    sessions = [domain for domain in before if domain != OLD]
    lengths = {
        domain: {"prompts": before[domain]["prompts"], "tokens": before[domain]["tokens"],
                 "before": accepted_length(before[domain]), "after": accepted_length(after[domain])}
        for domain in before
    }  # fmt: skip
    return {"before": together(before, sessions), "after": together(after, sessions), "domains": lengths}


def change(one: dict[str, Any]) -> str:
    """By how much a domain's tokens a step differ: +12.3%."""
    return f"{one['after'] / one['before'] - 1:+.1%}"


def card_section(record: dict[str, Any]) -> str:
    """The figures as a paragraph and a table in Markdown."""
    rows = [
        f"| {domain} | {one['prompts']} | {one['before']:.2f} | {one['after']:.2f} | {change(one)} |"
        for domain, one in record["domains"].items()
    ]
    return (
        f"Adapted to its user's sessions: {record['steps']:,} steps, {record['tokens']:,} tokens, "
        f"{record['minutes']:g} minutes. Tokens a step in greedy decoding of held-out prompts, before and after, on "
        "the same texts" + (f" ({OLD}: other text)" if OLD in record["domains"] else "") + ":\n\n"
        "| domain | prompts | before | after | change |\n|---|---:|---:|---:|---:|\n" + "\n".join(rows)
    )


def _serve(options: AdaptOptions, model: SpecModel, stored: torch.dtype) -> dict[str, Any]:
    """Write the head back in the format in which it came, if that is another program's → where, or why not."""
    foreign = find_foreign(options.head, hub_options(options.head))
    if foreign is None:
        return {}
    folder = options.output / SERVED
    able = engines_for(model.config, model.base, model.head)
    forms = [form_for(model.config, model.base, model.head, engine) for engine in able]
    # Several engines read the form of one; the file says which only by what it holds.
    same = [form.engine for form in forms if isinstance(form, type(foreign.form))]
    engine = foreign.form.engine if foreign.form.engine in same or not same else same[0]
    try:
        if not folder.is_dir():
            model.export(folder, engine, dtype=stored)
    except CheckpointError as error:
        return {"not_served": f"it was not written back: {error}"}
    return {"served": str(folder), "form": foreign.form.title}
