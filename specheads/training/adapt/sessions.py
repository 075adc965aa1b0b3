"""Sessions: rows of a user's own traffic, split into those to train on and those to measure on, as token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specheads.data.chat_template import ChatTemplate, MissingTemplate
from specheads.data.config import DataConfig
from specheads.data.row_forms import Dropped, messages_of, parse_messages, reason_of, tools_of
from specheads.data.rows import IGNORED, chunk, tokenize
from specheads.data.sources import load_dataset_rows

DOMAIN = "domain"  # the column that names a row's
WHOLE = "sessions"  # the domain of rows that name none
_OPENING = 64  # most tokens of a text that are a prompt
Session = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and the domain that they count for."""

    domain: str
    ids: list[int]


def read_sessions(sources: Sequence[str]) -> list[Session]:
    """The rows, each once: a session that is in both parts of a split would be measured on what was trained on."""
    rows = load_dataset_rows([*sources], prompt_column="prompt")
    return list({json.dumps(row, sort_keys=True, default=str): row for row in rows}.values())


def domain_of(row: Session) -> str:
    return str(row.get(DOMAIN) or WHOLE)


def split(rows: Sequence[Session], held_out: int, seed: int) -> tuple[list[Session], list[Session]]:
    """(to train on, held out): at most `held_out` sessions and a quarter of each domain, spread over the domains as the
    rows are. ValueError if a domain is too small, of two rows or more, to hold one out and train on another."""
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} sessions: expected at least 2 different ones, one to train on and one held out")
    share = min(0.25, held_out / len(rows))
    by_domain: dict[str, list[Session]] = {}
    for row in rows:
        by_domain.setdefault(domain_of(row), []).append(row)
    train, measured = list[Session](), list[Session]()
    for domain in sorted(by_domain):
        theirs = by_domain[domain]
        random.Random(f"{seed} {domain}").shuffle(theirs)
        count = max(1, round(share * len(theirs))) if len(theirs) > 1 else 0
        measured += theirs[:count]
        train += theirs[count:]
    if not measured:
        raise ValueError(f"each of the {len(rows)} sessions has a domain of its own, so none can be held out")
    return train, measured


def has_answer(row: Session) -> bool:
    """Whether the row says what is learnt, so that the base need not write it."""
    if row.get("input_ids") is not None:
        return True
    try:
        messages = messages_of(row)
        if messages is not None:
            return any(message["role"] == "assistant" for message in parse_messages(messages))
    except ValueError:
        return True  # token_rows says what is wrong with it
    return row.get("prompt") is None


def token_rows(
    rows: Sequence[Session], tokenizer: Any, max_length: int, stops: Collection[int]
) -> tuple[list[dict[str, Any]], Dropped]:
    """The rows as input_ids and labels, without the malformed ones, which are counted."""
    config, made, dropped = DataConfig(train=WHOLE, max_length=max_length), list[dict[str, Any]](), Dropped()
    for number, row in enumerate(rows, start=1):
        try:
            for part in chunk(tokenize(row, tokenizer, config, stops), max_length, tokenizer):
                made.append({name: [*part[name]] for name in ("input_ids", "labels")})
        except MissingTemplate:
            raise
        except ValueError as error:
            dropped.add(reason_of(error), number, str(error))
    return made, dropped


def prompts(rows: Sequence[Session], tokenizer: Any, room: int, domain: str | None = None) -> list[Prompt]:
    """What the base is asked in a session: its last question, after all before it. room: the most tokens, which are the
    last ones. domain: theirs, instead of what the rows name."""
    asked = []
    for row in rows:
        try:
            ids = _prompt(row, tokenizer)
        except MissingTemplate:
            raise
        except ValueError:
            continue  # token_rows says which rows are malformed
        if ids:
            asked.append(Prompt(domain or domain_of(row), ids[-room:]))
    return asked


def _prompt(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    if row.get("input_ids") is None and (messages := messages_of(row)) is not None:
        messages = parse_messages(messages)
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        asked = messages[: answers[-1]] if answers else messages
        text = ChatTemplate(tokenizer, tools_of(row)).text(asked, generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if row.get("input_ids") is None and row.get("prompt") is not None:
        return list(tokenizer(row["prompt"], verbose=False)["input_ids"])
    ids = tokenize(dict(row), tokenizer, DataConfig(train=WHOLE))
    labels = ids["labels"]
    starts = [at for at in range(1, len(labels)) if labels[at] != IGNORED and labels[at - 1] == IGNORED]
    if starts and starts[-1] > 2:
        return list(ids["input_ids"][: starts[-1]])
    return list(ids["input_ids"][: min(_OPENING, max(1, len(labels) // 2))])
