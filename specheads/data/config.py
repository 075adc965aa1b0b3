"""DataConfig: what to train on, and how rows become token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specheads.options import OptionError, refuse_unknown

# Arguments of apply_chat_template, which a variable of that name would replace.
_RESERVED = ("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize")


@dataclass(frozen=True)
class DataConfig:
    """What to train on. train, eval: path, list of paths, glob, saved dataset folder, hub id, Dataset or rows.

    max_length: tokens of a row; max_samples: rows of train, drawn with `seed`; eval_fraction: share of the train rows
    held out if there is no eval. chat_template_kwargs: variables of the chat template, such as enable_thinking: false,
    set as the server sets them. split, eval_split and subset only apply to hub ids and saved folders.
    """

    train: Any
    eval: Any = None
    split: str = "train"
    eval_split: str = "test"
    subset: str | None = None
    text_column: str = "text"
    messages_column: str = "messages"
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_length: int = 2048
    packing: bool = False
    num_proc: int | None = None
    max_samples: int | None = None
    seed: int = 0
    eval_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.train is None or (isinstance(self.train, (str, list, tuple)) and not self.train):
            raise OptionError(
                "{train}: give a path, a list of paths, a glob, a hub dataset id or rows", train=self.train
            )
        for name, least in {"max_length": 2, "num_proc": 1, "max_samples": 1, "seed": 0}.items():
            value = getattr(self, name)
            if value is None and name in ("num_proc", "max_samples"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"{{{name}}}: expected a whole number of at least {least}", **{name: value})
        if self.packing not in (True, False):
            raise ValueError(f"packing={self.packing!r}: expected true or false")
        if not isinstance(self.eval_fraction, (int, float)) or not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction!r}: expected a number in [0, 1)")
        if self.eval is not None and self.eval_fraction:
            raise ValueError(f"eval and eval_fraction={self.eval_fraction} are both given: give one of the two")
        template_variables(self.chat_template_kwargs)
        if self.text_column == self.messages_column:
            raise ValueError(f"text_column and messages_column are both {self.text_column!r}: they must differ")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> DataConfig:
        """ValueError for an unknown key, with the nearest known one, and for a missing `train`."""
        refuse_unknown(options, [field.name for field in fields(cls)], what="data option")
        if "train" not in options:
            raise ValueError("data option 'train' is missing: give a path, a list of paths, a glob or a hub dataset id")
        return cls(**options)


def template_variables(variables: Any) -> dict[str, Any]:
    """The variables of a chat template, as a dict. OptionError for anything else, and for those with another source."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise OptionError(
            "{chat_template_kwargs}: expected variables of the chat template, such as enable_thinking: false",
            chat_template_kwargs=variables,
        )
    if taken := sorted(set(_RESERVED) & variables.keys()):
        raise OptionError(
            "{chat_template_kwargs}: " + taken[0] + " comes from the rows or the tokenizer; leave it out",
            chat_template_kwargs=dict(variables),
        )
    return dict(variables)
