"""Sections of the HTML page for what `specheads audit`, `adapt` and `generate` print with --json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from specheads.audit.page import FIGURES
from specheads.bench.web.parts import DEPTH_COLORS, heat, table
from specheads.training.adapt.run import change


def section(record: dict[str, Any], path: Path) -> Iterator[str] | None:
    """The parts for a record of one of these commands; None if it is of another. ValueError if it lacks something."""
    for named, parts in _KINDS:
        if named <= record.keys():
            return _checked(parts, record, path)
    return None


def _checked(parts: Callable[[dict[str, Any]], Iterator[str]], record: dict[str, Any], path: Path) -> Iterator[str]:
    try:
        yield from parts(record)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of this version's command ({error!r}); run it again") from error


def audit(record: dict[str, Any]) -> Iterator[str]:
    """The verdict, a line for each way of asking, and the evidence."""
    server, verdict, alpha = record["server"], record["verdict"], record["alpha"]
    yield f"<h3>{escape(f'{server}: {verdict}')}</h3>"
    yield f'<p class="note">a right server is called not lossless with a chance of at most {alpha:g}</p>'
    results = record["results"]
    columns = ("asked for", "verdict", "texts", "tokens", *(FIGURES.get(name, name) for name in _figures(results)))
    lines = []
    for result in results:
        figures = [result["figures"].get(name) for name in _figures(results)]
        lines.append([
            str(result["settings"]), result["verdict"], f"{result['texts']:,}", f"{result['tokens']:,}",
            *("–" if value is None else f"{value:.3g}" for value in figures),
        ])  # fmt: skip
    yield table(columns, lines)
    for result in results:
        said = [*([f"This is {result['mistake']}."] if result["mistake"] else []), *result["evidence"]]
        if said:
            yield f"<h3>{escape(str(result['settings']))}</h3><ul>"
            yield "".join(f"<li>{escape(line)}</li>" for line in said) + "</ul>"
    if compared := record.get("acceptance"):
        sides = {f"{name}: {compared[name]['tokens_per_step']:.2f} tokens a step": compared[name] for name in _SIDES}
        shares = {name: [n / side["steps"] for n in side["by_depth"]] for name, side in sides.items() if side["steps"]}
        yield f"<h3>steps that accepted a draft this deep</h3>{heat(shares, 'depth')}"


def adapted(record: dict[str, Any]) -> Iterator[str]:
    """Tokens a step before and after, by domain."""
    yield "<h3>tokens a step on held-out sessions, on the same texts</h3>"
    yield table(("", "prompts", "before", "after", "change"), [
        [name, str(one["prompts"]), f"{one['before']:.2f}", f"{one['after']:.2f}", change(one)]
        for name, one in record["domains"].items()
    ])  # fmt: skip
    yield f'<p class="note">trained on {record["tokens"]:,} tokens in {record["steps"]:,} steps, '
    yield f"{record['minutes']:g} minutes; saved as {escape(str(record['written']))}</p>"


def text(record: dict[str, Any]) -> Iterator[str]:
    """A generated text, each token in the colour of the depth at which it was drafted."""
    deepest = len(DEPTH_COLORS)
    statistics = record["statistics"]
    spans = (
        f'<span class="depth{min(depth, deepest)}">{escape(piece)}</span>' if depth else escape(piece)
        for piece, depth in zip(record["pieces"], record["draft_depths"], strict=True)
    )
    yield f"<h3>{escape(str(record['base']))} with {escape(str(record['drafter'] or 'no drafts'))}</h3>"
    yield f'<pre class="text"><span class="soft">{escape(record["prompt"])}</span>{"".join(spans)}</pre>'
    keys = " ".join(f'<span class="depth{d}">{d}{"+" if d == deepest else ""}</span>' for d in range(1, deepest + 1))
    yield f'<p class="note">accepted drafts at depth {keys}; all else is the model\'s own. '
    yield f"{statistics['tokens']} tokens in {statistics['steps']} steps, {statistics['tokens_per_second']:.1f} "
    yield f"tokens/s, {statistics['accepted_length']:.2f} tokens a step</p>"


def _figures(results: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result["figures"]))


_SIDES = ("server", "here")
_KINDS: tuple[tuple[set[str], Callable[[dict[str, Any]], Iterator[str]]], ...] = (
    ({"server", "verdict", "results"}, audit), ({"before", "after", "domains"}, adapted),
    ({"token_ids", "draft_depths"}, text),
)  # fmt: skip
