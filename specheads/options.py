"""Options given by name in recipes, head arguments and files. Unknown ones are refused by name. Messages shorten the
values that they quote, since files are untrusted."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from numbers import Integral, Real
from typing import Any

import yaml

_LISTED = 24  # most known names that a message lists
_LONGEST = 80  # most characters of a value or name that a message quotes


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A field of a dataclass of options, declared once for Python, a record and the command line.

    more: min and max of a number; metavar and flags, how a command spells it; autocompletion, the words of its value;
    named, whether the name alone of a shipped checkpoint will do.
    """
    return field(default=default, metadata={"help": help, **more})


def argument(metavar: str, help: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that a command takes by position, as METAVAR; otherwise as `option`."""
    return option(default, help, metavar=metavar, positional=True, **more)


@dataclass(frozen=True)
class Suggestion:
    """A value that an OptionError suggests, as opposed to one that was given."""

    value: object


class OptionError(ValueError):
    """An error about options that have two spellings: name=value in Python and recipes, --name value on a command line.

    str() uses the first spelling; a command prints render(its flags). The text has {name} for an option. `options` maps
    the name to its value, to ... (show only the name), or to a Suggestion to give that value.
    """

    def __init__(self, text: str, /, **options: object) -> None:
        self.text, self.options = text, options
        super().__init__(self.render({}))

    def render(self, flags: Mapping[str, str], typed: Collection[str] | None = None) -> str:
        """The text with the options in `flags`, such as {"batch_size": "--batch-size"}, spelled as flags.

        typed: the options given on the command line; others came from a file. None: all were typed.
        """

        def spell(found: re.Match[str]) -> str:
            name = found[1]
            if name not in self.options:
                return found[0]
            value = self.options[name]
            shows_flag = typed is None or name in typed or value is ... or isinstance(value, Suggestion)
            flag = flags.get(name) if shows_flag else None
            value = value.value if isinstance(value, Suggestion) else value
            return _spelled(name, value, flag)

        return re.sub(r"\{([\w.]+)\}", spell, self.text)


def _spelled(name: str, value: object, flag: str | None) -> str:
    if flag is None:
        return name if value is ... else f"{name}={shown(value)}"
    return flag if value is ... or value is True else f"{flag} {shortened(value)}"


def refuse_unknown(given: Iterable[object], known: Iterable[str], what: str = "option", section: str = "") -> None:
    """ValueError for a name that is not in `known`, with the nearest known one, or a list of them if none is similar.

    what: the kind of option, for the message. section: a prefix of each name, such as "training.".
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        near = nearest(name, known)
        listed = ", ".join(known[:_LISTED]) + (", …" if len(known) > _LISTED else "")
        hint = f"did you mean {section + near!r}?" if near else f"known: {listed}"
        raise ValueError(f"unknown {what} {shown(section + str(name))}; {hint}")


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name most similar to this one; None if none is similar."""
    near = difflib.get_close_matches(str(name), known, n=1) if len(str(name)) <= _LONGEST else []
    return near[0] if near else None


def require_packages(extra: str, *names: str) -> None:
    """ImportError, with the extra of specheads that installs them, unless these packages are installed."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ImportError(f"this needs {', '.join(missing)}: pip install 'specheads[{extra}]'")


def refuse_class(argument: str, value: object, what: str, method: str) -> None:
    """TypeError if `value` is a class with this method, instead of an instance of it. what: the kind of object."""
    if not isinstance(value, type) or not hasattr(value, method):
        return
    parameters = inspect.signature(value).parameters.values()
    wanted = ", ".join(p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
    name = value.__name__
    raise TypeError(f"{argument}={name} is the class of a {what}; give one of its objects: {argument}={name}({wanted})")


def require_number(name: str, value: object) -> None:
    """TypeError unless the value given as `name` is a number; True and False do not count as numbers."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={shown(value)} must be a number")


def require_whole(name: str, value: object) -> None:
    """TypeError unless the value given as `name` is an integer; True and False do not count as integers."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={shown(value)} must be a whole number")


def require_count(name: str, value: Any) -> None:
    """TypeError unless the value given as `name` is a number, ValueError unless it is whole. 6.0 counts as whole."""
    require_number(name, value)
    if not float(value).is_integer():
        raise ValueError(f"{name}={shown(value)} must be a whole number")


def shown(value: object) -> str:
    """A value as quoted in messages, by its repr: one line of at most 80 characters."""
    return shortened(value, quoted=repr)


def shortened(name: object, most: int = _LONGEST, quoted: Callable[[object], str] = str) -> str:
    """A name as quoted in messages, without quotation marks: one line of at most `most` characters."""
    try:
        text = quoted(name)
    except (RecursionError, ValueError):  # nested too deeply, or a number with thousands of digits
        text = f"a {type(name).__name__} that is too large to show"
    start = text[: most + 1]
    start = start if start.isprintable() else repr(start)[1:-1]
    return start if len(start) <= most else start[: most - 1] + "…"


def reason(error: object) -> str:
    """The message of another library's error, on one line of at most 300 characters."""
    return shortened(" ".join(str(error)[:2000].split()), 300)


def listing(names: Iterable[str], most: int = 6, quoted: Callable[[str], str] = shortened) -> str:
    """The first `most` names, and the number of the others."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(quoted, names[:most])) + more


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number. (YAML 1.1 requires 1.0e-4 and reads 1e-4 as text.)"""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str, name: str) -> Any:
    """The value of a YAML text. ValueError, with a message that starts with `name`, if it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error
