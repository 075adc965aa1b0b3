"""A session: answers a prompt under its settings, and keeps the conversation and what the target has read of it."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from specheads.cli.chat.settings import change, compared
from specheads.cli.chat.tree import TreeWatch
from specheads.cli.options.decode import ChatOptions
from specheads.data.conversation import Conversation, Message
from specheads.decoding.acceptance import Acceptance, as_rule
from specheads.decoding.drafters import Drafter
from specheads.decoding.drafters.model import NO_LIMIT
from specheads.decoding.generation.generate import SpecGenerateOutput, generate
from specheads.decoding.loop import step_watch
from specheads.decoding.planner import Plan, as_plan
from specheads.decoding.results import Step
from specheads.decoding.verify.hf_base import has_state, text_config
from specheads.models.named import Models
from specheads.models.payoff import Drafted, loss, watch_head

TRIED = 2  # tokens decoded to test new settings; the first one is not drafted
DECODING = ("draft", "tree", "accept", "temperature", "compare")  # settings whose changes are tested by decoding


class Interruption(StoppingCriteria):
    """A stopping criterion that is met once the user has asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.asked)


@contextmanager
def stoppable() -> Iterator[Interruption]:
    """In the block, the first Ctrl-C stops after the current step; a second one raises KeyboardInterrupt, in case that
    step takes long."""
    stop = Interruption()

    def ask(number: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    # Only the main thread gets signals. If SIGINT is ignored, as in a shell's background job, it stays ignored.
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield stop
        return
    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Way:
    """One way to decode: its name in a table, the drafter with its text, and the arguments of generate(). cache: what
    it has read so far."""

    name: str
    draft: str
    drafter: Drafter | None
    plan: Plan | None
    rule: Acceptance
    sampling: dict[str, Any]
    cache: DynamicCache | None = None


@dataclass(frozen=True)
class Answer:
    """full: it reached the model's last position; stopped: the user stopped it; loss: a line, if drafting did not pay
    by costs that are known."""

    name: str
    steps: list[Step]
    text: str
    statistics: dict[str, Any]
    full: bool
    stopped: bool
    loss: str | None

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens[0]]


class Session:
    """Models, options, and the conversation so far."""

    def __init__(self, models: Models, options: ChatOptions) -> None:
        """ValueError if the options do not fit the models."""
        self.models, self.tokenizer, self.trees = models, models.tokenizer, TreeWatch()
        if options.chat is None:
            options = replace(options, chat=bool(self.tokenizer.chat_template))
        self.options = options
        self.forget()
        self._refuse_unfit(options)
        self._try(options)

    def forget(self) -> None:
        """Forget the conversation."""
        self.turns: list[tuple[str, str]] = []  # (prompt, answer)
        self.last: tuple[str, int, int] | None = None  # the last prompt, its seed, and the number of turns before it
        self._caches: list[DynamicCache | None] = []  # of each way to answer

    def change(self, name: str, text: str) -> None:
        """Run the command `/name text`. If it raises ValueError, nothing has changed."""
        try:
            new = change(self.options, name, text)
            if name == "chat" and new.chat is None:
                new = replace(new, chat=bool(self.tokenizer.chat_template))
            if name in ("chat", "system"):
                self._refuse_unfit(new)
            if name in DECODING:
                self._try(new)
        except ValueError as error:
            raise ValueError(f"/{name}: {error}") from error
        except OSError as error:
            reason = f"{error.strerror}: {error.filename}" if error.filename else error
            raise ValueError(f"/{name}: {reason}") from error
        self.options = new

    def ways(self, options: ChatOptions | None = None) -> list[Way]:
        """How the next prompt is answered: by the settings, and by each that are compared with them."""
        first = self.options if options is None else options
        others = enumerate(compared(first), start=1)
        return [self._way(first, 0), *(replace(self._way(other, i), name=name) for i, (name, other) in others)]

    def _way(self, options: ChatOptions, index: int) -> Way:
        shaped = options.tree is not None or options.accept is not None
        name, drafter = self.models.choose(options.draft, shaped=shaped)
        plan, rule = as_plan(options.tree, drafter), as_rule(options.accept)
        label = ", ".join(filter(None, (name or "no drafts", options.tree, options.accept)))
        kept = not (self.models.target.config.is_encoder_decoder or has_state(self.models.target))
        while len(self._caches) <= index:
            self._caches.append(DynamicCache() if kept else None)
        return Way(label, options.draft, drafter, plan, rule, options.sampling(), self._caches[index])

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids before the answer. ValueError if there are none or the template refuses the prompt."""
        if not self.options.chat:
            ids = list(self.tokenizer(prompt, verbose=False)["input_ids"])
        else:
            asked = [*(question for question, _ in self.turns), prompt]
            turns: list[tuple[Message, ...]] = [({"role": "user", "content": question},) for question in asked]
            if self.options.system is not None:
                turns[0] = ({"role": "system", "content": self.options.system}, *turns[0])
            ids = Conversation(tuple(turns)).prompt([answer for _, answer in self.turns], self.tokenizer)
        if not ids:
            raise ValueError("the prompt has no tokens; give at least one character")
        return ids

    def seed(self) -> int:
        """The seed for the next prompt."""
        return secrets.randbelow(2**31) if self.options.seed is None else self.options.seed

    def answer(
        self, way: Way, prompt: str, seed: int, *, streamer: Any = None, stop: Interruption | None = None
    ) -> Answer:
        """streamer: as in generate(). ValueError if the prompt does not fit into the model's positions."""
        ids, target, asked = self.prompt_ids(prompt), self.models.target, way.sampling["max_new_tokens"]
        positions = getattr(text_config(target), "max_position_embeddings", None) or NO_LIMIT
        if len(ids) >= positions:
            advice = "; /clear begins a new conversation" if self.turns and self.options.chat else ""
            raise ValueError(f"the prompt takes {len(ids)} tokens, and the model has {positions} positions{advice}")
        room = positions - prompt_length(target, ids)
        watched = step_watch.set(self.trees)
        try:
            with watch_head() as uses:
                out = self._generate(
                    way, ids, seed, max_new_tokens=min(asked, room), streamer=streamer, past_key_values=way.cache,
                    stopping_criteria=None if stop is None else StoppingCriteriaList([stop]),
                )  # fmt: skip
        finally:
            step_watch.reset(watched)
        assert out.steps is not None
        tokens = [token for step in out.steps for token in step.tokens[0]]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        full = len(tokens) == room < asked
        line = None
        if way.drafter is not None:
            line = loss(self.models, Drafted(
                draft=way.draft, drafter=way.drafter, plan=way.plan, steps=out.steps, prompt=len(ids),
                limit=min(asked, room), uses=uses, sampled=way.sampling["do_sample"],
            ))  # fmt: skip
        return Answer(way.name, out.steps, text, out.statistics(), full, stop is not None and stop.asked, line)

    def _generate(self, way: Way, ids: list[int], seed: int, **options: Any) -> SpecGenerateOutput:
        prompt: Tensor = torch.tensor([ids], device=self.models.target.device)
        return generate(  # type: ignore[return-value]
            self.models.target, prompt, attention_mask=torch.ones_like(prompt), draft=way.drafter, tree=way.plan,
            accept=way.rule, seed=seed, return_dict_in_generate=True, **{**way.sampling, **options},
        )  # fmt: skip

    def _refuse_unfit(self, options: ChatOptions) -> None:
        if options.chat and not self.tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template, so prompts remain text to continue")
        if options.system is None:
            return
        if not options.chat:
            raise ValueError(
                "a system message begins a conversation, and prompts are text to continue here: switch it to chats "
                "with /chat on (--chat), or leave the message out"
            )
        messages: tuple[Message, ...] = (
            {"role": "system", "content": options.system}, {"role": "user", "content": "a"},
        )  # fmt: skip
        ids = Conversation((messages,)).prompt((), self.tokenizer)
        if options.system.strip() not in self.tokenizer.decode(ids):
            raise ValueError("the model's chat template ignores system messages")

    def _try(self, options: ChatOptions) -> None:
        """Decode one step, so that a drafter, tree and rule that do not fit together are refused when they are set.
        This also warms up the models."""
        ids = list(self.tokenizer("a")["input_ids"])
        before = prompt_length(self.models.target, ids)

        def enough(text: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((len(text),), text.shape[1] >= before + TRIED)

        for way in self.ways(options):
            length = TRIED + (way.plan.depth if way.plan else 0)  # room for a whole tree
            self._generate(way, ids, 0, max_new_tokens=length, eos_token_id=None, stopping_criteria=[enough])


def prompt_length(model: PreTrainedModel, ids: list[int]) -> int:
    """Number of decoder tokens before the answer to the prompt `ids`: for an encoder-decoder, just the start token."""
    return 1 if model.config.is_encoder_decoder else len(ids)
