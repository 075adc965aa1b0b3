"""The console's settings, and the commands that change them: each returns new settings or raises ValueError."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import LogitsProcessorList

from specheads.cli.chat.lines import unescaped
from specheads.compat import processors
from specheads.decoding.acceptance import RULES, rule_named
from specheads.decoding.drafters import DRAFTERS
from specheads.decoding.drafters.ngram import NGramStorage, OneLevelNGramStorage
from specheads.decoding.planner import PLANS, tree_named
from specheads.options import refuse_unknown
from specheads.terminal import utf8_text

DEBUG = ("off", "steps", "depth")
STORAGES = {"basic": NGramStorage, "onelevel": OneLevelNGramStorage}
SWITCH = ("on", "off")
PROCESSORS: dict[str, Callable[..., processors.LogitsProcessor]] = {
    "greedy": processors.GreedyProcessor,
    "multinomial": processors.MultinomialProcessor,
    "topk": processors.TopKProcessor,
    "nucleus": processors.NucleusProcessor,
    "topknucleus": processors.TopKNucleusProcessor,
}


def numbers_of(name: str) -> tuple[str, ...]:
    """The names of the numbers that a processor takes, in order."""
    return tuple(inspect.signature(PROCESSORS[name]).parameters)


@dataclass(frozen=True)
class Processor:
    """How the next token is picked: filters first, then the temperature. (Hugging Face's options do it the other way
    round, which gives a different nucleus.)"""

    name: str = "greedy"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        refuse_unknown([self.name], PROCESSORS, "processor")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature:g} must be a number above 0; greedy takes the likeliest")
        if "top_k" in numbers_of(self.name) and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} must be at least 1 token")
        if "top_p" in numbers_of(self.name) and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p:g} must be above 0 and at most 1")

    @classmethod
    def of(cls, text: str) -> Processor:
        """Parse a name and its numbers, such as `nucleus 0.8 0.9`. Only the temperature may be left out."""
        name, *given = text.split() or [""]
        refuse_unknown([name], PROCESSORS, "processor")
        wanted = numbers_of(name)
        usage = f"{name} {' '.join(wanted).upper()}"
        if len(given) > len(wanted) or (given and len(given) < len(wanted)) or (len(wanted) > 1 and not given):
            raise ValueError(f"{usage}: {len(given)} of {len(wanted)} numbers given")
        kinds: dict[str, Callable[[str], Any]] = {"temperature": number, "top_k": whole, "top_p": number}
        try:
            return cls(name, **{key: kinds[key](text) for key, text in zip(wanted, given, strict=False)})
        except ValueError as error:
            raise ValueError(f"{usage}: {error}") from error

    def __str__(self) -> str:
        numbers = ", ".join(f"{key} {getattr(self, key):g}" for key in numbers_of(self.name))
        return self.name if self.name == "greedy" else f"{self.name} ({numbers})"

    @property
    def samples(self) -> bool:
        return self.name != "greedy"

    def warpers(self) -> LogitsProcessorList:
        made = PROCESSORS[self.name](*(getattr(self, name) for name in numbers_of(self.name)))
        return LogitsProcessorList([made])


@dataclass(frozen=True)
class Settings:
    """target, speculative, ngram, alone: which ways of decoding answer a prompt (alone: the draft model by itself).

    drafter: of the speculative way; tree: as on the command line, overriding gamma, the length of a chain; with
    neither, the drafter's default. ngram_n: tokens in an n-gram. seed: of all ways; None for a new one each prompt.
    """

    target: bool = True
    speculative: bool = True
    ngram: bool = False
    alone: bool = False
    drafter: str = "head"
    accept: str = "exact"
    tree: str | None = None
    gamma: int | None = None
    length: int = 128
    processor: Processor = Processor()
    seed: int | None = None
    chat: bool = False
    system: str | None = None
    debug: str = "off"
    storage: str = "basic"
    ngram_n: int = 3
    top_k_filler: int = 3
    reset_in_between: bool = False
    remember: bool = True

    def __post_init__(self) -> None:
        refuse_unknown([self.debug], DEBUG, "view")
        refuse_unknown([self.storage], STORAGES, "n-gram storage")
        for name, least in (("length", 1), ("gamma", 1), ("seed", 0), ("ngram_n", 2), ("top_k_filler", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name.replace('ngram_n', 'n')} {value} must be at least {least}")
        rule_named(self.accept)
        if self.system is not None:
            utf8_text(self.system, "the system message")
        if self.tree is not None:
            tree_named(self.tree)


# The defaults of another console, where they differ from ours.
LIKE: dict[str, dict[str, Any]] = {
    "romsto": {"gamma": 4, "length": 35, "seed": 42, "ngram": True, "reset_in_between": True, "remember": False}
}


def settings_like(name: str | None, **given: Any) -> Settings:
    """Settings with the given options (None: not given) on top of the defaults of a console in LIKE. ValueError for an
    unknown name."""
    if name is not None:
        refuse_unknown([name], LIKE, "console")
    return Settings(**{**(LIKE[name] if name else {}), **{key: one for key, one in given.items() if one is not None}})


@dataclass(frozen=True)
class Command:
    """usage: its arguments, for help; value: the current value, for help; change: settings and the rest of the line →
    new settings (None for commands of the console itself); words: for each argument the words it may be, if any."""

    usage: str
    meaning: str
    value: Callable[[Settings], str] = lambda settings: ""
    change: Callable[[Settings, str], Settings] | None = None
    words: tuple[Sequence[str], ...] = ()


def change(settings: Settings, name: str, rest: str) -> Settings:
    """The settings after the command `/name rest`. ValueError for bad arguments."""
    command = COMMANDS[name].change
    assert command is not None, name
    return command(settings, rest.strip())


def _toggled(value: bool, rest: str) -> bool:
    if rest not in ("", *SWITCH):
        raise ValueError(f"{rest!r} is neither on nor off")
    return not value if not rest else rest == "on"


def _switch(field: str, meaning: str) -> Command:
    def changed(settings: Settings, rest: str) -> Settings:
        new: Any = {field: _toggled(getattr(settings, field), rest)}
        return replace(settings, **new)

    return Command(
        "[on|off]", meaning, lambda settings: "on" if getattr(settings, field) else "off", changed, (SWITCH,)
    )


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number" if text else "give a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _set_storage(settings: Settings, rest: str) -> Settings:
    kind, *n = rest.split() or [""]
    if len(n) > 1:
        raise ValueError(f"expected {'|'.join(STORAGES)} and one number, not {rest!r}")
    return replace(settings, storage=kind, ngram_n=whole(n[0]) if n else settings.ngram_n)


def _set_debug(settings: Settings, rest: str) -> Settings:
    if rest in ("", "on"):
        return replace(settings, debug="steps" if rest or settings.debug == "off" else "off")
    return replace(settings, debug=rest)


def _set_drafter(settings: Settings, rest: str) -> Settings:
    if rest in ("", "on", "off"):
        return replace(settings, alone=_toggled(settings.alone, rest))
    return replace(settings, drafter=rest, alone=False)


def _set_tree(settings: Settings, rest: str) -> Settings:
    if rest in ("", "default"):
        return replace(settings, tree=None, gamma=None)
    return replace(settings, tree=rest)


def _value_or_none(text: str) -> str | None:
    return None if text in ("", "none") else text


def _usages(*, lossless: bool) -> str:
    """Usages of the rules that are lossless with any options, or else of the other rules."""
    return ", ".join(RULES.usage(name) for name, rule in RULES.items() if (rule.lossless is True) == lossless)


COMMANDS: dict[str, Command] = {
    "target": _switch("target", "the target alone, one token a step; speed-ups are over it"),
    "speculative": _switch("speculative", "the target with the drafter"),
    "ngram": _switch("ngram", "the target with n-grams learnt while decoding"),
    "drafter": Command(
        "[on|off|NAME]", f"NAME: auto[:FILE], head, model, {', '.join(map(DRAFTERS.usage, DRAFTERS))}, or a checkpoint "
        "(head or model) to draft with; without it: the draft model alone, too",
        lambda s: f"{s.drafter}, alone: {'on' if s.alone else 'off'}", _set_drafter,
    ),
    "accept": Command(
        "RULE[:ARGS]",
        f"how drafts are accepted; lossless: {_usages(lossless=True)}; lossy: {_usages(lossless=False)}",
        lambda s: s.accept,
        lambda s, rest: replace(s, accept=rest),
    ),
    "tree": Command(
        "[TREE]", f"{', '.join(map(PLANS.usage, PLANS))}; alone: the drafter's own",
        lambda s: s.tree or (f"chain of {s.gamma}" if s.gamma else "the drafter's own"), _set_tree,
    ),
    "gamma": Command(
        "N", "draft chains of N tokens, n-grams too", lambda s: str(s.gamma or "as the drafter has it"),
        lambda s, rest: replace(s, gamma=whole(rest), tree=None),
    ),
    "length": Command(
        "N", "tokens to generate at most", lambda s: str(s.length), lambda s, rest: replace(s, length=whole(rest))
    ),
    "processor": Command(
        "NAME NUMBERS", "greedy; multinomial T; topk T K; nucleus T P; topknucleus T K P: filters, then the "
        "temperature T", lambda s: str(s.processor), lambda s, rest: replace(s, processor=Processor.of(rest)),
        (tuple(PROCESSORS),),
    ),
    "seed": Command(
        "[N]", "of the sampling, the same for all; alone: a fresh one a prompt",
        lambda s: "fresh" if s.seed is None else str(s.seed),
        lambda s, rest: replace(s, seed=None if _value_or_none(rest) is None else whole(rest)),
    ),
    "chat": _switch("chat", "prompts are turns of a conversation in the chat template; off: text to be continued"),
    "system": Command(
        "[TEXT]", "what the conversation begins with", lambda s: "none" if s.system is None else repr(s.system),
        lambda s, rest: replace(s, system=_value_or_none(unescaped(rest))),
    ),
    "debug": Command(
        "[on|off|depth]", "show drafts: accepted, rejected, the target's own; depth: by depth of the draft",
        lambda s: s.debug, _set_debug, ((*SWITCH, "depth"),),
    ),
    "set_ngramstorage": Command(
        "basic|onelevel N", "contexts of N − 1 tokens and all shorter ones, or of N − 1 alone; begins anew",
        lambda s: f"{s.storage} {s.ngram_n}", _set_storage, (tuple(STORAGES),),
    ),
    "top_k_filler": Command(
        "N", "n-grams learn the target's N likeliest tokens", lambda s: str(s.top_k_filler),
        lambda s, rest: replace(s, top_k_filler=whole(rest)),
    ),
    "reset_in_between": _switch("reset_in_between", "n-grams forget each prompt before the next"),
    "remember": _switch("remember", "the conversation continues from prompt to prompt; off: each begins a new one"),
    "cache": Command("", "always on: each token is read once, and the text is the same", lambda s: "on"),
    "clear": Command("", "forget the conversation, and clear the screen"),
    "help": Command(
        "", r"this list. In a prompt \n is a newline, \t a tab, \\n the two characters; between three double quotes "
        "every character is itself",
    ),
    "quit": Command("", "leave (Ctrl-D, too)"),
}  # fmt: skip
