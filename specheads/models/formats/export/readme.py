"""The README of an export: what it is, the command that serves it, and the accepted lengths to expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads.heads import DraftHead
from specheads.models.formats.format import Format
from specheads.models.run_files import accepted_length, results
from specheads.version import __version__

_DECODED = {"temperature", "prompts", "new_tokens", "tree", "accepted_length"}


def readme(form: Format, head: DraftHead, checkpoint: Any, base: str, folder: str, served: str) -> str:
    """Markdown for the directory of an export. checkpoint: the folder with the head and its run, if any; base: the
    base's name; served: its name in the other program's commands."""
    config: Any = head.config
    lines = [
        f"# {form.title}", "",
        f"A draft head of kind {config.kind} for `{base}`, exported by specheads {__version__}.", "",
        form.serve(served, folder, config.served_depth).rstrip(), "",
        f"Written for: {form.versions}. docs/compatibility.md of specheads says what was run and what was only read.",
    ]  # fmt: skip
    lines += ["", "The paths above are those of the machine that wrote this.", "", "## What to expect", ""]
    if rows := measured(checkpoint, head.scored_depths):
        lines += [
            "Tokens gained in one step of decoding (the accepted length, the bonus token included):", "",
            "| text | how it was measured | tokens a step |", "|---|---|---:|",
            *(f"| {text} | {how} | {length:.2f} |" for text, how, length in rows), "",
            "Compare a server with a decoded row of the same temperature and draft length: sampled text accepts less, "
            "longer drafts more. An estimate weighs every position alike, so decoding differs from it. If the server "
            "accepts much less, it has loaded the head wrongly; the text is right even then.",
        ]  # fmt: skip
    else:
        lines += [
            "Its accepted length was not recorded; `specheads evaluate` measures it in greedy decoding. Compare the "
            "server with it: a head that is loaded wrongly still gives the right text, only slowly.",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def measured(checkpoint: Any, depth: int) -> list[tuple[str, str, float]]:
    """Recorded accepted lengths of the head: (greedy or sampled, how it was measured, tokens per step).

    depth: drafted tokens that training scores. The figures were recorded by training (estimates, and decoding in the
    parity gate) and by benchmarks/accepted_length.py (`decoded`).
    """
    folder = Path(str(checkpoint or ""))
    found = results(folder) if checkpoint and folder.is_dir() else {}
    estimate = f"estimated by training on its held-out rows, a chain of {depth} from every position"
    decoded = "decoded at the end of its training, held-out prompts"
    known = [
        ("greedy", f"{estimate}: first choices that are the base's own", accepted_length(checkpoint)),
        ("sampled, T = 1", f"{estimate}: overlap of the distributions", found.get("eval_accepted_length_sampled")),
        ("greedy", f"{decoded}, a chain of {depth}", found.get("parity_measured")),
        ("greedy", f"{decoded}, its default tree", found.get("parity_served")),
    ]
    recorded = found.get("decoded")
    for run in recorded if isinstance(recorded, list) else ():
        if not isinstance(run, dict) or not run.keys() >= _DECODED or not isinstance(run["temperature"], int | float):
            continue  # written by another program or a later version
        temperature = run["temperature"]
        text = f"sampled, T = {temperature:g}" if temperature else "greedy"
        prompts = f"{run['prompts']} prompts of {run.get('set', 'held-out files')}"
        how = f"decoded by specheads, {prompts} × {run['new_tokens']} tokens, {run['tree']}"
        known.append((text, how, run["accepted_length"]))
    return [(text, how, float(length)) for text, how, length in known if isinstance(length, int | float)]
