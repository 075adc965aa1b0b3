"""decode(): the only loop. One step drafts a tree, verifies it in one pass, and commits what the rule accepts.

Shapes: B batch rows, N tree nodes, P = depth of the tree + 1, V vocabulary, K top tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from specheads.decoding.acceptance import Acceptance, Verdict
from specheads.decoding.acceptance.rule import missing_draft_probs
from specheads.decoding.compiled import CompiledSteps, StepCompiler
from specheads.decoding.compiled.graphs import DEFAULT_BACKEND
from specheads.decoding.drafters.base import Advance, Context, Drafter, with_defaults
from specheads.decoding.kernels.few_rows import few_row_kernels, few_row_layers
from specheads.decoding.planner import NoDraft, Plan
from specheads.decoding.planner.plan import LimitRows, RecordDraftLogits
from specheads.decoding.probs.processors import ProcessorWatch
from specheads.decoding.probs.randomness import DRAFT
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.refill import NewRows, Refill, only_last_position, replace_rows
from specheads.decoding.results import Gain, Step, TokenScores, divergences_of, scores_of
from specheads.decoding.schedule import StepSchedule, cut_past_limits, end_mask, limit_rows, schedule_step
from specheads.decoding.step import HostPart, Rows, step_after_draft, top_tokens
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.model_inputs import ModelInputs
from specheads.decoding.verify.verifier import Verifier

Stop = Callable[..., int]  # see decode()

# For benchmarks: called with the name of each part of the loop when that part ends: "prefill" (refills included), then
# in every step "other", "draft", "verify" and "accept" (compiled, accepting is part of "verify", or the whole step is
# one part, "step"). None, the default, costs one look-up a step.
part_timer: ContextVar[Callable[[str], None] | None] = ContextVar("part_timer", default=None)

# Called after each step with its tree, the target's logits at its nodes (B, N, V) and the verdict; not if the step is
# compiled, since those tensors stay in the graph.
step_watch: ContextVar[Callable[[DraftTree, Tensor, Verdict], None] | None] = ContextVar("step_watch", default=None)


def decode(
    target: Verifier,
    drafter: Drafter | None,
    ids: Tensor,
    lengths: Tensor,
    *,
    plan: Plan | None,
    sampler: Sampler,
    accept: Acceptance,
    stop: Stop,
    max_new_tokens: int | Sequence[int],
    inputs: ModelInputs | None = None,
    eos: Collection[int] = (),
    keep_scores: bool = False,
    keep_divergences: bool = False,
    refill: Refill | None = None,
    compiled: CompiledSteps | None = None,
    kernels: bool = True,
) -> Iterator[Step]:
    """Generate from prompts ids (B, T), packed left, of lengths (B,). Yields one Step at a time until all rows stop.

    drafter None (with plan None) is plain autoregressive decoding: the same loop over root-only trees.
    stop(row, ids, count) looks at a row's ids, of which the last `count` are new. It returns how many of those to keep,
    or a negative number if the row continues. With keep_scores it gets a fourth argument, the processed scores (V,) of
    each new token. eos: ids that always end a row. max_new_tokens: one number, or one a row; nothing is drafted past
    it, and logits processors do not run past it or past an end. inputs: what the model takes besides ids. refill:
    called between steps for new prompts to replace finished rows; their first tokens come in a Step of their own. It
    needs a `refillable` drafter and a base whose positions do not depend on the length.
    compiled: what compiles the steps; it needs a target made with static=True. kernels: as in generate().
    """
    drafter = None if drafter is None else with_defaults(drafter)
    limits = [max_new_tokens] * len(ids) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    loop = _Loop(
        target, drafter, plan, sampler, accept, stop, limits, eos, keep_scores, keep_divergences, compiled, kernels
    )  # fmt: skip
    yield loop.prefill(ids, lengths, inputs)
    if refill is not None:
        target.switch = None  # no text of a refilled batch reaches the length at which positions change
    while True:
        finished = [row for row, runs in enumerate(loop.running) if not runs]
        if refill is not None and finished and (new := refill(finished)) is not None:
            yield loop.refill(new)
        elif len(finished) < len(loop.running):
            yield loop.step(queue_pending=refill is not None and not finished)
        else:
            return


@dataclass
class _Loop:
    """One call of decode(): its arguments, and the state between its steps, which prefill() makes.

    limits, row_limits (B,): the most new tokens of each row, on the host and on the device. running: the rows that have
    not stopped. active (B,), active_rows: those that take part in the step, on the device and on the host. count (B,):
    tokens gained. end_ids: eos as a tensor, None if no logits processor reads prefixes. watch: until it is known if a
    logits processor cannot judge drafts; meanwhile nothing is drafted. num_top: how many of the target's likeliest
    tokens the drafter wants. few_row_layers: those whose products in a step are our own.

    Inference mode spares each operation its autograd bookkeeping, a tenth of a step on a CPU. It is entered by each
    step: around a generator, torch's wrapper would run when a stream that was left early is freed, at exit after torch.
    """

    target: Verifier
    drafter: Drafter | None
    plan: Plan | None
    sampler: Sampler
    accept: Acceptance
    stop: Stop
    limits: list[int]
    eos: Collection[int]
    keep_scores: bool
    keep_divergences: bool
    compiled: CompiledSteps | None
    kernels: bool

    compiler: StepCompiler | None = field(init=False)
    active_rows: list[bool] = field(init=False, default_factory=list)
    active: Tensor = field(init=False)
    running: list[bool] = field(init=False)
    prompts: list[list[int]] = field(init=False)
    context: Context = field(init=False)
    row_limits: Tensor = field(init=False)
    count: Tensor = field(init=False)
    end_ids: Tensor | None = field(init=False)
    watch: ProcessorWatch | None = field(init=False)
    num_top: int = field(init=False)
    few_row_layers: list[nn.Linear] = field(init=False, default_factory=list)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, lengths: Tensor, inputs: ModelInputs | None) -> Step:
        """Step 0: read the prompts and draw the first token of each row."""
        began = time.perf_counter()
        sampler, batch = self.sampler, ids.shape[0]
        self.num_top = 0 if self.drafter is None else self.drafter.wants_target_top
        out = self.target.prefill(ids, lengths, room=self.room, inputs=inputs)
        logits = out.logits[:, 0]
        sampler.finite = sampler.finite.to(logits.device)
        self.running = [True] * batch
        self.prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
        sampler.seed_rows(batch, logits.device)
        root, scores = self.first_tokens(logits, torch.arange(batch, device=logits.device))
        context = Context.start(self.target, ids, lengths, out.features, root, top_tokens(out.logits, self.num_top))
        self.context = replace(context, sampled=sampler.do_sample)
        require_finite(bool(sampler.finite))
        self.count, self.row_limits = torch.ones_like(root), root.new_tensor(self.limits)
        if self.plan and (self.accept.uses_draft_probs or self.keep_divergences):
            self.plan = RecordDraftLogits(self.plan)
        self.watch = (
            ProcessorWatch.start(sampler.processors, sampler.rows_together and batch > 1) if self.plan else None
        )
        self.end_ids = None
        if sampler.needs_prefix:
            self.end_ids = torch.tensor(sorted(self.eos), dtype=ids.dtype, device=root.device)
        self.compiler = None
        if self.compiled is not None and self.compiled.serves(self.target):
            self.compiler = StepCompiler(
                self.compiled, self.target, self.drafter, self.plan, self.accept, sampler, self.num_top,
                details=self.keep_scores or self.keep_divergences,
            )  # fmt: skip
        if self.kernels:
            modules = (*self.target.modules, *(self.drafter.draft_modules if self.drafter else ()))
            # Where a C++ compiler runs anyway, a small model is worth one more file.
            compiles = self.compiler is not None and self.compiler.steps.backend == DEFAULT_BACKEND
            self.few_row_layers = few_row_layers(modules, fewest_bytes=0 if compiles else None)

        kept_scores = [] if scores is None else [[pair] for pair in zip(logits, scores, strict=True)]
        tokens = self.apply_stop([[row[-1]] for row in self.context.history], kept_scores)
        nothing: list[list[int]] = [[] for _ in range(batch)]
        end_prefill()
        return Step(tokens, [0] * batch, nothing, [0] * batch, time.perf_counter() - began, kept_scores)

    @torch.inference_mode()
    def refill(self, new: NewRows) -> Step:
        """Step 0 of new prompts, which replace finished rows."""
        began = time.perf_counter()
        batch, rows = len(self.running), self.context.root.new_tensor(new.rows)
        out = self.target.refill(rows, new.ids, new.lengths, room=new.limits)
        prompts = zip(new.ids.tolist(), new.lengths.tolist(), strict=True)
        for row, limit, (ids, length) in zip(new.rows, new.limits, prompts, strict=True):
            self.running[row], self.limits[row], self.prompts[row] = True, limit, ids[:length]
        logits = out.logits[:, 0]
        self.sampler.reseed_rows(rows, new.seeds)
        root, scores = self.first_tokens(logits, rows)
        require_finite(bool(self.sampler.finite))
        top = top_tokens(out.logits, self.num_top)
        context = Context.start(self.target, new.ids, new.lengths, out.features, root, top)
        if self.drafter is not None and self.plan is not None and self.context.memory:
            self.drafter.refill(self.context, new.rows, context, self.plan)
            context = only_last_position(context)
        self.context = replace_rows(self.context, new.rows, context)
        self.count, self.row_limits = self.count.index_fill(0, rows, 1), root.new_tensor(self.limits)
        if self.compiler is not None:
            self.compiler.renew()

        gained: list[list[int]] = [[] for _ in range(batch)]
        kept_scores: TokenScores = [[] for _ in range(batch)] if self.keep_scores else []
        for i, row in enumerate(new.rows):
            gained[row] = [self.context.history[row][-1]]
            if scores is not None:
                kept_scores[row] = [(logits[i], scores[i])]
        tokens = self.apply_stop(gained, kept_scores)
        end_prefill()
        return Step(
            tokens, [0] * batch, [[] for _ in gained], [0] * batch, time.perf_counter() - began, kept_scores
        )  # fmt: skip

    @torch.inference_mode()
    def step(self, *, queue_pending: bool) -> Step:
        """One step of all running rows. queue_pending: may a new prompt replace the next row that finishes?"""
        with few_row_kernels(self.few_row_layers):
            return self._step(queue_pending)

    def _step(self, queue_pending: bool) -> Step:
        began, end_part = time.perf_counter(), part_timer.get()
        schedule = schedule_step(self.target, self.plan, self.running, self.context.history, self.prompts, self.limits)
        self.context = replace(self.context, remaining=schedule.remaining, queue_pending=queue_pending)
        self.context.prepare()
        if schedule.active != self.active_rows:  # copied only when a row ends: the host waits for each copy
            self.active_rows = schedule.active
            self.active = torch.tensor(schedule.active, device=self.context.root.device)
        self.target.active = None if all(schedule.active) else self.active
        if end_part:
            end_part("other")
        advance = host = None
        if self.compiler is not None:
            shortened = schedule.plan is not self.plan
            advance = self.compiler.whole_step(self.context, self.rows, self.row_limits, shortened)
            if end_part:
                end_part("step")
        if advance is None:
            tree = self.draft(schedule)
            if end_part:
                end_part("draft")
            if self.compiler is not None:
                advance = self.compiler.step_after_draft(tree, self.rows)
                if end_part:
                    end_part("verify")
            if advance is None:
                ends = None if self.end_ids is None else end_mask(tree, self.end_ids, schedule.remaining)
                host = HostPart(
                    self.context.history, ends, self.keep_scores, self.keep_divergences,
                    (self.compiler or self.target).verify, end_part,
                )  # fmt: skip
                rows = self.rows(tree.max_depth)
                advance = step_after_draft(self.target, self.accept, self.sampler, tree, rows, self.num_top, host)
                self.end_watch(host.logits, schedule.active)
                if (watch := step_watch.get()) is not None:
                    watch(tree, host.logits, host.verdict)
        gain = self.transfer(advance)
        scores = [] if host is None or not self.keep_scores else scores_of(host.verdict, gain)
        step = self.report(schedule, gain, scores, began)
        if host is not None and self.keep_divergences:
            step = replace(step, **divergences_of(tree, host.verdict, schedule.active, step.accepted))
        return step

    def draft(self, schedule: StepSchedule) -> DraftTree:
        """The drafter's tree; the root alone if there is no drafter or plan, or if the plan is to draft nothing."""
        plan = schedule.plan
        if self.drafter is None or plan is None:
            return DraftTree.root_only(self.context.root)
        if not all(schedule.remaining) and not isinstance(plan, NoDraft | LimitRows):
            plan = limit_rows(plan, schedule.remaining)
        if self.watch is not None:
            plan = NoDraft(plan)
        self.sampler.begin(DRAFT, self.count)
        tree = self.drafter.propose(self.context, self.sampler, plan)  # under NoDraft it still reads the text
        if isinstance(plan, NoDraft):
            return DraftTree.root_only(self.context.root)
        if tree.logits is None and tree.num_nodes > 1 and self.accept.requires_draft_probs:
            raise missing_draft_probs(self.accept, self.drafter)
        by_target_alone = tree.probs is None and self.accept.is_exact(self.sampler)
        return tree if by_target_alone else cut_past_limits(tree, schedule.remaining)

    def end_watch(self, logits: Tensor, active: Sequence[bool]) -> None:
        """After the first step: draft from now on, unless a logits processor cannot judge drafts. logits (B, N, V)."""
        if self.watch is None:
            return
        history = self.context.history
        if not self.watch.may_draft(lambda: self.sampler.mixing(logits[:, 0], lambda: history, active)):
            self.plan = None
        self.watch = None

    def first_tokens(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (R, V) after the prompts of these rows (R,) → the first token (R,) of each, and if they are kept the
        processed scores (R, V) that gave it."""
        sampler, batch = self.sampler, len(self.running)
        # One number a row and token, whatever is drafted: a seed gives the same text with and without drafts.
        numbers = sampler.token_numbers(rows.new_zeros(batch), 1, 0)
        numbers = None if numbers is None else numbers[:, 0].index_select(0, rows)
        if sampler.needs_prefix:  # these processors are called for the whole batch
            chosen = set(rows.tolist())
            others = [row not in chosen for row in range(batch)]
            everywhere = logits.new_zeros(batch, logits.shape[1]).index_copy(0, rows, logits)
            processed = sampler.scores(everywhere, lambda: self.prompts, others).index_select(0, rows)
            root = sampler.draw(sampler.probs_of(processed), numbers)
            sampler.note_finite(~logits.gather(1, root.unsqueeze(1)).isnan())
            scores = processed if self.keep_scores else None
        else:
            root, finite = sampler.draw_from_logits(logits, numbers)
            sampler.note_finite(finite)
            scores = sampler.scores(logits, list) if self.keep_scores else None
        return root, scores

    def rows(self, depth: int) -> Rows:
        """What a step with a tree of this depth reads of the rows."""
        numbers = None
        if self.sampler.do_sample:
            most = max(len(row) - len(ids) for row, ids in zip(self.context.history, self.prompts, strict=True))
            numbers = self.sampler.token_numbers(self.count, depth + 1, most)
        return Rows(self.context.root, self.active, numbers, self.count)

    def transfer(self, advance: Advance) -> Gain:
        """The step's only transfer to the host; appends the gained tokens to the text."""
        rows, width = advance.columns.tolist(), advance.following.shape[1]
        require_finite(all(row[-3] for row in rows))
        gain = Gain(
            tokens=[row[: row[-1]] for row in rows],
            ranks=[row[width + 1 : width + row[-1]] for row in rows],
            drafted=[row[-2] for row in rows],
        )
        self.count = self.count + advance.length
        self.context = self.context.extend(advance, gain.tokens, gain.ranks)
        return gain

    def report(self, schedule: StepSchedule, gain: Gain, scores: TokenScores, began: float) -> Step:
        """The Step for the caller: what each row gained up to where it stops. scores: of the gained tokens, if kept."""
        tokens = self.apply_stop(gain.tokens, scores)
        scores = [pairs[: len(row)] for pairs, row in zip(scores, tokens, strict=False)]
        # The last token a row may gain is the target's own, even if longer rows made its draft reach that far.
        most = [max(0, min(len(row), room) - 1) for row, room in zip(gain.tokens, schedule.remaining, strict=True)]
        accepted = [min(count, len(kept)) for count, kept in zip(most, tokens, strict=True)]
        ranks = [row[:n] for row, n in zip(gain.ranks, accepted, strict=True)]
        drafted = [n if active else 0 for n, active in zip(gain.drafted, schedule.active, strict=True)]
        return Step(tokens, accepted, ranks, drafted, time.perf_counter() - began, scores)

    def apply_stop(self, gained: list[list[int]], scores: TokenScores) -> list[list[int]]:
        """Each row's new tokens up to where it stops. Marks the rows that stop. scores: of the new tokens, if kept."""
        tokens = []
        for row, new in enumerate(gained):
            given = [[processed for _, processed in scores[row]]] if self.keep_scores else []
            kept = self.stop(row, self.context.history[row], len(new), *given) if new else -1
            self.running[row] &= kept < 0
            tokens.append(new if kept < 0 else new[:kept])
        return tokens

    @property
    def room(self) -> int | list[int]:
        """The most new tokens: one number for all rows, or one a row if they differ."""
        return self.limits[0] if len(set(self.limits)) == 1 else self.limits


def end_prefill() -> None:
    if (end_part := part_timer.get()) is not None:
        end_part("prefill")


def require_finite(finite: bool) -> None:
    """ValueError unless every distribution that was drawn from had a finite sum, and no token's logit was NaN."""
    if not finite:
        raise ValueError(
            "the distribution of a token has no finite sum: the model's logits hold NaN or infinity; check its "
            "weights, its dtype and the logits processors"
        )
