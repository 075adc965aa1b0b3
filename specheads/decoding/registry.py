"""Registry: classes by name, and the one syntax that writes their objects as text: `fuzzy:js:0.2:k=5`."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specheads.options import nearest, refuse_unknown

E = TypeVar("E")  # the type of a registry's entries
_NOUNS = {int: "a whole number", float: "a number"}


class Registry(dict[str, E]):
    """Entries by name. An entry is a frozen dataclass or a function; its parameters are the options of its texts.

    A text is NAME, then values, each after a colon: VALUE for the next positional option, KEY=VALUE for any.
    An option's annotation says how its value is read. A Path comes first and takes the rest of the text; a tuple takes
    all remaining values. Positional options: the entry's `positional`; without it all, in order, up to a tuple.
    If an entry has a classmethod `from_text`, its parameters are the options; **options there adds the class's own.
    A keyword-only parameter is no option: the caller of `build` supplies it.

    what: the kind of entry, for messages. option: the option or argument that takes the texts. commas: do commas
    separate values as colons do?
    """

    def __init__(self, what: str, option: str, entries: Mapping[str, E], *, commas: bool = False) -> None:
        super().__init__(entries)
        self.what, self.option, self.commas = what, option, commas

    def build(self, text: str, **context: Any) -> Any:
        """The object the text names. context: values for keyword-only parameters; an entry gets those it takes.

        ValueError, one line that quotes the text, if it names none.
        """
        return self.make(text, *self.parse(text), **context)

    def parse(self, text: str) -> tuple[str, dict[str, str]]:
        """The name of the text's entry, and its options as they are written. ValueError as in `build`."""
        given, _, rest = text.partition(":")
        name = given.strip().lower()
        if name not in self:
            near = nearest(name, self)
            hint = f"did you mean {near!r}? " if near else ""
            raise ValueError(f"{self.option} {text!r}: unknown {self.what} {name!r}; {hint}{self.expected}")
        kinds, order = option_types(self[name]), positional(self[name])
        if order and kinds[order[0]] is Path:
            return name, {order[0]: rest} if rest else {}
        options: dict[str, str] = {}
        for word in re.split("[:,]" if self.commas else ":", rest) if rest else ():
            key, equals, value = (part.strip() for part in word.partition("="))
            if not equals:
                free = [key for key in order if key not in options or kinds[key] is tuple]
                if not free:
                    raise ValueError(f"{self.option} {text!r}: {word!r} is one value too many; {self.expected}")
                key, value = free[0], word.strip()
            elif key in options:
                raise ValueError(f"{self.option} {text!r}: {key} is given twice")
            options[key] = f"{options[key]},{value}" if key in options else value
        return name, options

    def make(self, text: str, name: str, options: Mapping[str, str], **context: Any) -> Any:
        """The object of entry `name` with these options, both as `parse` returns them. ValueError as in `build`."""
        entry = self[name]
        kinds = option_types(entry)
        try:
            refuse_unknown(options, kinds, f"option of {name}")
            values = {key: _read(key, value, kinds[key]) for key, value in options.items()}
            missing = [key for key, p in _parameters(entry).items() if key in kinds and p.default is p.empty]
            if missing := [key for key in missing if key not in values]:
                raise ValueError(f"{missing[0]} is missing; {self.expected}")
            asked = inspect.signature(_maker(entry)).parameters.values()
            given = {p.name: context[p.name] for p in asked if p.kind is p.KEYWORD_ONLY and p.name in context}
            return _maker(entry)(**values, **given)
        except ValueError as error:
            raise ValueError(f"{self.option} {text!r}: {error}") from error

    def write(self, value: Any) -> str:
        """The shortest text from which `build` makes an equal object. Only for entries that are classes."""
        name = next((name for name, entry in self.items() if entry is type(value)), None)
        if name is None:
            raise ValueError(f"{type(value).__name__} is not a registered {self.what}; {self.expected}")
        order, parameters = list(positional(self[name])), _parameters(self[name])
        values = {key: getattr(value, key) for key in parameters}
        while order and values[order[-1]] == parameters[order[-1]].default:
            order.pop()
        changed = [k for k, v in values.items() if k not in positional(self[name]) and v != parameters[k].default]
        words = [*(_shown(values[key]) for key in order), *(f"{key}={_shown(values[key])}" for key in changed)]
        return ":".join([name, *words])

    def usage(self, name: str) -> str:
        """`fuzzy:DIVERGENCE:THRESHOLD[:MODE]`: the entry's positional options, those that may be left out in [ ]."""
        kinds, parameters, order = option_types(self[name]), _parameters(self[name]), positional(self[name])
        needed = max(
            (i for i, key in enumerate(order, 1) if parameters[key].default is inspect.Parameter.empty), default=0
        )
        text = name
        for i, key in enumerate(order):
            mark = "," if self.commas and i else ":"
            value = f"{key.upper()},…" if kinds[key] is tuple else key.upper()
            text += f"{mark}{value}" if i < needed else f"[{mark}{value}"
        return text + "]" * (len(order) - needed)

    @property
    def expected(self) -> str:
        """`expected exact, block or …`: the usage of every entry."""
        *others, last = map(self.usage, self)
        return f"expected {', '.join(others)} or {last}" if others else f"expected {last}"


def option_types(entry: Any) -> dict[str, Any]:
    """The type each option of an entry is read as: bool, int, float, str, Path, or tuple for whole numbers."""
    hints = typing.get_type_hints(entry) | typing.get_type_hints(_maker(entry))
    kinds = {key: _kind(hints.get(key, str)) for key in _parameters(entry)}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def positional(entry: Any) -> tuple[str, ...]:
    """The options that may be written without their names, in order."""
    own: Iterable[str] | None = getattr(entry, "positional", None)
    if own is not None:
        return tuple(own)
    kinds = option_types(entry)
    last = next((i for i, kind in enumerate(kinds.values(), 1) if kind is tuple), None)
    return tuple(kinds)[:last]


def _maker(entry: Any) -> Callable[..., Any]:
    return getattr(entry, "from_text", entry)


def _parameters(entry: Any) -> dict[str, inspect.Parameter]:
    given = inspect.signature(_maker(entry)).parameters.values()
    own = {p.name: p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD}
    if _maker(entry) is not entry and any(p.kind is p.VAR_KEYWORD for p in given):
        own |= {name: p for name, p in inspect.signature(entry).parameters.items() if name not in own}
    return own


def _kind(hint: Any) -> Any:
    """The type an option with this annotation is read as; None if it is none of those of `option_types`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next((kind for one in typing.get_args(hint) if (kind := _kind(one)) is not None), None)
    if typing.get_origin(hint) is tuple:
        return tuple if typing.get_args(hint) == (int, ...) else None
    return hint if hint in (bool, int, float, str, Path) else None


def _read(key: str, text: str, kind: Any) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{key}={text!r} is neither true nor false")
        return text == "true"
    if kind is tuple:
        return tuple(_read(key, part, int) for part in text.split(","))
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{key}={text!r} is not {_NOUNS[kind]}") from error


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
