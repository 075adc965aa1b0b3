"""Measures one setting: speed, interleaved with its reference, accepted drafts and right answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from specheads.bench import cost, decoders, runner
from specheads.bench.figures.samples import figures, rounds_of
from specheads.bench.prompts import spaced_indices
from specheads.bench.sweep.drafters import Bench
from specheads.bench.sweep.grid import CLOCKS, PLAIN, Setting, Sweep
from specheads.bench.sweep.kl import Distance, distance
from specheads.bench.sweep.tasks import Task
from specheads.data.conversation import Conversation
from specheads.decoding.acceptance import rule_named
from specheads.decoding.drafters import Cascade, Drafter
from specheads.decoding.generation import prompt_batches
from specheads.decoding.generation.hf_options import NEUTRAL
from specheads.decoding.generation.recorded import Record, review, sum_columns
from specheads.decoding.planner import Plan, as_plan
from specheads.decoding.probs.randomness import row_seeds

Row = dict[str, Any]
# Columns that vary between runs of the same setting. The first four are also those of `specheads bench`.
SPEED = ("tokens_per_second", "speed_up", "speed_up_interval", "step_seconds")
TIMED = (*SPEED, "seconds", "speed_up_of_each_repeat")


def decoder(bench: Bench, setting: Setting, max_new_tokens: int) -> runner.Decoder:
    """A decoder that runs our loop with this setting, ignoring the target's own generation config: the distance of its
    text is measured from the target's plain logits."""
    sampling = dict(NEUTRAL)
    if setting.temperature:
        sampling |= {"do_sample": True, "temperature": setting.temperature, "top_k": setting.top_k}
    drafter = bench.drafter(setting.drafter, setting.k_matrix)
    plan = plan_of(setting, drafter)
    return decoders.specheads_generate(
        bench.base, max_new_tokens, draft=drafter or False, plan=plan, accept=rule_named(setting.accept), **sampling
    )


def plan_of(setting: Setting, drafter: Drafter | None) -> Plan | None:
    """The setting's tree; None for the drafter's default, or if nothing is drafted."""
    if drafter is None or setting.tree is None:
        return None
    return as_plan(setting.tree, drafter)


def prompts_of(bench: Bench, sweep: Sweep, task: Task) -> list[list[int]]:
    """The token ids of each prompt, in the chat template if `sweep.chat`. ValueError for a prompt without tokens."""
    made = []
    for question in task.questions:
        prompt = question.prompt
        if isinstance(prompt, str):
            text = Conversation.from_text(prompt).prompt((), bench.tokenizer) if sweep.chat else prompt
            prompt = bench.tokenizer(text)["input_ids"] if isinstance(text, str) else text
        made.append(prompt)
    if [] in made:
        raise ValueError(f"prompt {made.index([])} has no tokens; give at least one character")
    return made


def batches_of(
    bench: Bench, sweep: Sweep, setting: Setting, prompts: list[list[int]], indices: Sequence[int], size: int
) -> list[dict[str, Any]]:
    """Batches of `size` from the prompts at these indices. Each prompt is sampled with its own seed."""
    side = "right" if bench.base.config.is_encoder_decoder else "left"
    chosen, device = [prompts[i] for i in indices], bench.base.device
    batches: list[dict[str, Any]] = [*prompt_batches.batches(bench.tokenizer, chosen, device, size, side=side)]
    if setting.temperature:
        # By the prompt's index, so that no two prompts draw the same numbers, whatever the batch and setting.
        seeds = row_seeds(sweep.seed, len(prompts))
        for number, batch in enumerate(batches):
            batch["seeds"] = [seeds[i] for i in indices[number * size : (number + 1) * size]]
    return batches


def measure(
    bench: Bench, sweep: Sweep, task: Task, setting: Setting, *,
    report: Callable[[float, str], None] | None = None,
) -> Row:  # fmt: skip
    """Measure the setting's row. Text is judged on all prompts, in batches. Speed is measured on `speed_prompts` of
    them, evenly spaced, one by one, interleaved with the setting's reference, and given as a ratio to it."""
    prompts, length = prompts_of(bench, sweep, task), sweep.max_new_tokens or task.max_new_tokens
    own, other = str(setting), str(setting.reference)
    racers = {own: decoder(bench, setting, length)}
    racers[other] = racers.get(other) or decoder(bench, setting.reference, length)
    spaced = spaced_indices(len(prompts), sweep.speed_prompts)  # the first prompts may all be from one file
    batches = batches_of(bench, sweep, setting, prompts, spaced, 1)
    runs = len(batches) * len(racers) * sweep.repeats  # for progress; each judged batch counts as one more
    raced = runs / (runs + len(prompts) / sweep.batch_size)

    def racing(part: float, name: str) -> None:
        if report:
            report(part * raced, name)

    def judging(part: float) -> None:
        if report:
            report(raced + part * (1 - raced), f"judging {own}")

    race = runner.race(racers, batches, repeats=sweep.repeats, report=racing, clock=CLOCKS[sweep.clock])
    found = figures(rounds_of(race, other), own, other)
    return {
        **setting_columns(setting),
        "lossless": setting.lossless,
        "reference": None if other == own else other,
        **judge_texts(bench, sweep, task, setting, prompts, racers[own], judging),
        "seconds": median(sum(run.seconds for run in repeat) for repeat in race.runs[own]),
        **{name: found[name] for name in SPEED},
        "speed_up_of_each_repeat": [a / b for a, b in zip(race.speeds(own), race.speeds(other), strict=True)],
    }


def judge_texts(
    bench: Bench, sweep: Sweep, task: Task, setting: Setting, prompts: list[list[int]], run: runner.Decoder,
    report: Callable[[float], None],
) -> Row:  # fmt: skip
    """Figures of the setting's text on all prompts: accepted drafts, right answers, distance from the target."""
    drafter = bench.drafter(setting.drafter, setting.k_matrix)
    # A cascade counts its models' passes, which the rows of a batch would share.
    size = 1 if isinstance(drafter, Cascade) else sweep.batch_size
    far, right, outputs, passes = Distance(), 0, [], []
    batches = batches_of(bench, sweep, setting, prompts, range(len(prompts)), size)
    for start, batch in zip(range(0, len(prompts), size), batches, strict=True):
        report(start / len(prompts))
        taken = prompts[start : start + size]
        output = run(batch, None)
        outputs.append(output.statistics)
        passes.append(drafter.reviews if drafter and output.statistics["rows_stepped"] else ())
        far += distance(bench.base, taken, output.tokens, setting.temperature, setting.top_k)
        for text, question in zip(output.tokens, task.questions[start:], strict=False):
            if task.correct is not None:
                right += task.correct(bench.tokenizer.decode(text, skip_special_tokens=True), question)
    tokens, drafted, accepted, reviews, gained = (
        sum(s[name] for s in outputs) for name in ("tokens", "drafted", "accepted", "rows_stepped", "gained")
    )
    return {
        "prompts": len(prompts), "tokens": tokens, "reviews": reviews, "drafted": drafted, "accepted": accepted,
        "accepted_length": gained / reviews if reviews else 1.0,
        "acceptance_rate": accepted / drafted if drafted else None,
        "correct": right if task.correct is not None else None,
        "accuracy": right / len(prompts) if task.correct is not None else None,
        "mean_kl": far.mean if not setting.temperature else None,
        "surprisal_excess": far.mean,
        "outside": far.outside,
        **walltime(bench, drafter, gained, reviews, sum_columns(passes) if any(passes) else None),
    }  # fmt: skip


def walltime(bench: Bench, drafter: Any, gained: int, reviews: int, draft_reviews: list[int] | None) -> Row:
    """For a cascade: the reviews by each of its drafts, and the standardised walltime improvement under the sweep's
    cost model; None for other drafters, which do not count reviews. gained: tokens from `reviews` passes of the
    target."""
    if draft_reviews is None:
        return {"draft_reviews": None, "swi": None}
    costs = bench.costs(drafter)
    swi = cost.walltime_improvement(gained, [reviews, *draft_reviews], costs) if costs else None
    return {"draft_reviews": draft_reviews, "swi": swi}


def replay(bench: Bench, record: Record, setting: Setting, prompts: list[list[int]]) -> Row:
    """The setting's row, replayed against a record of the target's texts. Nothing is decoded, so there is no speed and
    there are no figures of the text."""
    drafter = bench.drafter(setting.drafter, setting.k_matrix)
    assert drafter is not None
    plan = plan_of(setting, drafter) or drafter.default_plan(bench.base.device, False)
    found = review(record, prompts, drafter, plan, bench.base.device)
    gained = found["tokens"] - len(prompts)
    empty = dict.fromkeys((
        "correct", "accuracy", "mean_kl", "surprisal_excess", "outside", *TIMED,
    ))  # fmt: skip
    return {
        **setting_columns(setting), "lossless": True, "reference": None, "prompts": len(prompts), **found,
        "acceptance_rate": found["accepted"] / found["drafted"] if found["drafted"] else None, **empty,
        **walltime(bench, drafter, gained, found["reviews"], found["draft_reviews"]),
    }  # fmt: skip


def setting_columns(setting: Setting) -> Row:
    """The setting as plain values."""
    return {
        "drafter": setting.drafter, "accept": None if setting.drafter == PLAIN else setting.accept,
        "k_matrix": setting.k_matrix or None, "tree": setting.tree, "temperature": setting.temperature,
        "top_k": setting.top_k,
    }  # fmt: skip
