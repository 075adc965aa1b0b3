"""A session: runs the decoders that are switched on for a prompt, with the same seed, and keeps the conversation."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList

from specheads.cli.chat.interrupt import Interruption
from specheads.cli.chat.settings import STORAGES, Settings, change
from specheads.data.conversation import Conversation, Message
from specheads.decoding.acceptance import Acceptance, Exact, rule_named
from specheads.decoding.drafters import Drafter, DraftModel, NGram, NGramStorage
from specheads.decoding.drafters.model import NO_LIMIT
from specheads.decoding.generation.generate import SpecGenerateOutput, generate
from specheads.decoding.loop import Step
from specheads.decoding.planner import Plan, SampledTree, as_plan, chain
from specheads.decoding.verify.hf_base import text_config, vocabulary_size
from specheads.models.named import Models, describe_drafter

TARGET = "target alone"
TRIED = 2  # tokens decoded to test new settings; the first one is not drafted
RUNS = ("drafter", "accept", "tree", "gamma", "processor")  # settings whose changes are tested by decoding


@dataclass(frozen=True)
class Mode:
    """One way of decoding. distribution: whose distribution the text has, as shown in the comparison."""

    name: str
    detail: str
    distribution: str
    model: PreTrainedModel
    tokenizer: Any
    drafter: Drafter | None = None
    plan: Plan | None = None
    rule: Acceptance = field(default_factory=Exact)


@dataclass(frozen=True)
class Outcome:
    """One decoder's answer. full: it reached the model's last position; stopped: the user stopped it."""

    mode: Mode
    steps: list[Step]
    text: str
    statistics: dict[str, Any]
    full: bool
    stopped: bool

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens[0]]


class Session:
    """Models, settings, the n-gram storage, and the conversation so far."""

    def __init__(self, models: Models, settings: Settings) -> None:
        """ValueError if the settings do not fit the models."""
        self.models, self.tokenizer = models, models.tokenizer
        self.settings = settings
        self.forget()
        self.storage = self._new_storage(settings)
        self._refuse_unfit(settings)
        _refuse_idle_system(settings)
        self._try(settings, target=True)

    def forget(self) -> None:
        """Forget the conversation; n-grams keep what they learnt."""
        self.turns: list[tuple[str, str]] = []  # (prompt, answer)

    def change(self, name: str, rest: str) -> None:
        """Run the command `/name rest`. If it raises ValueError, nothing has changed."""
        try:
            new = change(self.settings, name, rest)
            self._refuse_unfit(new)
            if name == "system":  # an earlier system message waits for /chat on
                _refuse_idle_system(new)
            if any(getattr(new, key) != getattr(self.settings, key) for key in RUNS):
                self._try(new)
        except ValueError as error:
            raise ValueError(f"/{name}: {error}") from error
        except OSError as error:
            said = f"{error.strerror}: {error.filename}" if error.filename else error
            raise ValueError(f"/{name}: {said}") from error
        if name == "set_ngramstorage":
            self.storage = self._new_storage(new)
        if not new.remember:
            self.forget()
        self.settings = new

    def modes(self, settings: Settings | None = None) -> list[Mode]:
        """The decoders that are switched on, the target alone first."""
        now = self.settings if settings is None else settings
        rule, sampled = rule_named(now.accept), now.processor.samples
        drafter = self.models.drafter(now.drafter)
        target = (self.models.target, self.tokenizer)
        modes = []
        if now.target:
            modes.append(Mode(TARGET, "a token a step", "the target's", *target))
        if now.speculative:
            plan = self._plan(now, drafter, sampled)
            shape = now.tree or (f"chain:{now.gamma}" if now.gamma else None)
            detail = ", ".join(filter(None, (describe_drafter(now.drafter, drafter), shape, now.accept)))
            modes.append(Mode("speculative", detail, _losslessness(rule), *target, drafter, plan, rule))
        if now.ngram:
            grams = NGram(
                now.gamma or NGram.num_tokens, storage=self.storage, filler_top_k=now.top_k_filler,
                reset_between=now.reset_in_between,
            )  # fmt: skip
            # N-grams have no draft probabilities to compare.
            own, name = (Exact(), "exact") if rule.requires_draft_probs else (rule, now.accept)
            modes.append(
                Mode("n-gram", f"{now.storage} {now.ngram_n}, {name}", _losslessness(own), *target, grams, None, own)
            )
        if now.alone:
            assert isinstance(drafter, DraftModel)
            tokenizer = drafter.tokenizer if drafter.through_text else self.tokenizer
            modes.append(Mode("draft model alone", drafter.small.name_or_path, "its own", drafter.small, tokenizer))
        return modes

    def prompt_ids(self, prompt: str, tokenizer: Any) -> list[int]:
        """The ids before the answer. ValueError if there are none or the template refuses the prompt."""
        if not self.settings.chat:
            ids = list(tokenizer(prompt, verbose=False)["input_ids"])
        else:
            asked = [*(question for question, _ in self.turns), prompt]
            turns: list[tuple[Message, ...]] = [({"role": "user", "content": question},) for question in asked]
            if self.settings.system is not None:
                turns[0] = ({"role": "system", "content": self.settings.system}, *turns[0])
            ids = Conversation(tuple(turns)).prompt([answer for _, answer in self.turns], tokenizer)
        if not ids:
            raise ValueError("the prompt has no tokens; give at least one character")
        return ids

    def seed(self) -> int:
        """The seed for the next prompt."""
        return secrets.randbelow(2**31) if self.settings.seed is None else self.settings.seed

    def run(
        self, mode: Mode, prompt: str, seed: int, *, drafter: Drafter | None = None,
        streamer: Any = None, stop: Interruption | None = None,
    ) -> Outcome:  # fmt: skip
        """One decoder's answer. drafter: replaces the mode's. streamer: as in generate().

        ValueError if the prompt does not fit into the model's positions.
        """
        ids = self.prompt_ids(prompt, mode.tokenizer)
        positions = getattr(text_config(mode.model), "max_position_embeddings", None) or NO_LIMIT
        if len(ids) >= positions:
            advice = "; /clear begins a new conversation" if self.turns and self.settings.chat else ""
            raise ValueError(f"the prompt takes {len(ids)} tokens, and the model has {positions} positions{advice}")
        room = positions - prompt_length(mode.model, ids)
        out = self._generate(
            mode, ids, self.settings, seed, min(self.settings.length, room), drafter=drafter, streamer=streamer,
            stopping_criteria=None if stop is None else StoppingCriteriaList([stop]),
        )  # fmt: skip
        assert out.steps is not None
        tokens = [token for step in out.steps for token in step.tokens[0]]
        text = mode.tokenizer.decode(tokens, skip_special_tokens=True)
        full = len(tokens) == room < self.settings.length
        return Outcome(mode, out.steps, text, out.statistics(), full, stop is not None and stop.asked)

    def keep(self, prompt: str, outcomes: Sequence[Outcome]) -> None:
        """Add the first decoder's answer to the conversation, unless the turn was stopped."""
        if (
            self.settings.chat
            and self.settings.remember
            and outcomes
            and not any(outcome.stopped for outcome in outcomes)
        ):
            self.turns.append((prompt, outcomes[0].text))

    def _generate(
        self, mode: Mode, ids: list[int], settings: Settings, seed: int, length: int, *,
        drafter: Drafter | None = None, **kwargs: Any,
    ) -> SpecGenerateOutput:  # fmt: skip
        prompt: Tensor = torch.tensor([ids], device=mode.model.device)
        if settings.processor.samples:
            # Neutral values, which override the model's own generation config.
            kwargs |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "logits_processor": settings.processor.warpers()}
        return generate(  # type: ignore[return-value]
            mode.model, prompt, attention_mask=torch.ones_like(prompt), draft=drafter or mode.drafter,
            tree=mode.plan, accept=mode.rule, seed=seed, max_new_tokens=length, do_sample=settings.processor.samples,
            return_dict_in_generate=True, **kwargs,
        )  # fmt: skip

    def _plan(self, settings: Settings, drafter: Drafter, sampled: bool) -> Plan | None:
        if settings.tree is not None:
            return as_plan(settings.tree, drafter)
        if settings.gamma is None:
            return None
        # Sampled from the draft's distribution if that is the drafter's default.
        usual = drafter.default_plan(self.models.target.device, sampled)
        return SampledTree((1,) * settings.gamma) if isinstance(usual, SampledTree) else chain(settings.gamma)

    def _new_storage(self, settings: Settings) -> NGramStorage:
        return STORAGES[settings.storage](settings.ngram_n, vocabulary_size(self.models.target))

    def _refuse_unfit(self, settings: Settings) -> None:
        drafter = self.models.drafter(settings.drafter)
        if settings.alone and not isinstance(drafter, DraftModel):
            raise ValueError(
                f"{settings.drafter!r} cannot write alone: that needs a draft model (--assistant, /drafter NAME)"
            )
        # _try() would not detect this: some drafters draft nothing until the text repeats itself.
        if not drafter.gives_draft_probs and rule_named(settings.accept).requires_draft_probs:
            raise ValueError(
                f"{settings.accept} compares the draft's probabilities with the target's, and {settings.drafter!r} "
                "has none: draft with a head or a draft model, or accept by another rule"
            )
        if (settings.chat or settings.system is not None) and not self.tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template, so prompts remain text to continue")
        if settings.system is not None:
            messages: tuple[Message, ...] = (
                {"role": "system", "content": settings.system}, {"role": "user", "content": "a"},
            )  # fmt: skip
            ids = Conversation((messages,)).prompt((), self.tokenizer)
            if settings.system.strip() not in self.tokenizer.decode(ids):
                raise ValueError("the model's chat template ignores system messages")

    def _try(self, settings: Settings, *, target: bool = False) -> None:
        """Decode one step, so that a drafter, tree and rule that do not fit together are refused when they are set.
        This also warms up the models."""
        ids = list(self.tokenizer("a")["input_ids"])
        before = prompt_length(self.models.target, ids)

        def enough(text: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((len(text),), text.shape[1] >= before + TRIED)

        for mode in self.modes(replace(settings, target=target, speculative=True, ngram=False, alone=False)):
            length = TRIED + (mode.plan.depth if mode.plan else 0)  # room for a whole tree
            self._generate(mode, ids, settings, 0, length, eos_token_id=None, stopping_criteria=[enough])


def prompt_length(model: PreTrainedModel, ids: list[int]) -> int:
    """Number of decoder tokens before the answer to the prompt `ids`: for an encoder-decoder, just the start token."""
    return 1 if model.config.is_encoder_decoder else len(ids)


def _refuse_idle_system(settings: Settings) -> None:
    """ValueError for a system message if prompts are text to be continued."""
    if settings.system is not None and not settings.chat:
        raise ValueError(
            "a system message begins a conversation, and prompts are text to continue here: switch it to chats with "
            "/chat on (--chat), or leave the message out"
        )


def _losslessness(rule: Acceptance) -> str:
    return "lossless" if rule.lossless else "lossy"
