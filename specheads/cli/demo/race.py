"""The demo's race: the decoders, their passes and speeds, why one loses, and whether all write the same text."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from specheads import terminal
from specheads.bench import environment
from specheads.bench.decoders import specheads_generate, transformers_generate
from specheads.bench.runner import Race, race
from specheads.models.spec_model import SpecModel

TRANSFORMERS = "transformers"  # its texts are what the others' are compared with
PLAIN = "plain"  # its speed is what the others' are divided by
REPEATS = 3
SECONDS = 100.0  # beyond which no further repeat starts
BUSY = 1.25  # times as many runnable threads as cores: then a speed says more of the other programs than of a decoder
LOSS = 0.95  # times plain's speed, below which a decoder loses
CURES = {
    "head": "; longer training helps (specheads train eagle3)",
    "auto": "; it assumes another machine's costs (specheads tune measures this one's)",
}
TIE = 1e-3  # logits closer than this may swap ranks between two float32 passes of different shape


def compare(
    base: PreTrainedModel, heads: dict[str, SpecModel], batches: list[dict[str, Tensor]], max_new_tokens: int,
    out: Console,
) -> Race:  # fmt: skip
    """Race transformers' generate(), and our loop without drafts, with copies, with each head and with "auto"."""
    racers = {
        TRANSFORMERS: transformers_generate(base, max_new_tokens),
        PLAIN: specheads_generate(base, max_new_tokens),
        "lookup": specheads_generate(heads["head"], max_new_tokens, draft="lookup"),
        **{name: specheads_generate(model, max_new_tokens) for name, model in heads.items()},
        "auto": specheads_generate(heads["head"], max_new_tokens, draft="auto"),
    }
    with terminal.progress(out, "racing") as tell:
        return race(racers, batches, repeats=REPEATS, budget=SECONDS, report=tell)


def is_busy(where: dict[str, Any]) -> bool:
    """Do other programs slow this one down, by the load of the environment's record?"""
    return where["load_average"] is not None and where["load_average"] > BUSY * where["cores"]


def print_figures(rows: dict[str, dict[str, Any]], where: dict[str, Any], new_tokens: int, out: Console) -> None:
    """Each decoder's passes, then its speed beside plain's, and why it loses if it does; on a busy machine no speed."""
    passes = {name: round(1 + (row["tokens"] / row["texts"] - 1) / tokens_a_pass(row)) for name, row in rows.items()}
    out.print(
        f"{new_tokens} tokens: {passes[PLAIN]} passes → {passes['head']} with the head, {passes['auto']} with auto",
        style="bold",
    )
    load, cores, busy = where["load_average"], where["cores"], is_busy(where)
    shares = {name: tokens_a_pass(row) if busy else row["speed_up"] for name, row in rows.items()}
    lines = [
        [name, terminal.bar(share / max(shares.values()), 24), str(passes[name])]
        + ([f"{share:.1f}"] if busy else [f"{rows[name]['tokens_per_second']:.0f}", f"{share:.1f}×"])
        for name, share in shares.items()
    ]
    columns = ("decoder", "", "passes", *(["tokens a pass"] if busy else ["tokens/s", "× plain"]))
    title = f"{rows[PLAIN]['texts']} texts of {new_tokens} tokens, greedy"
    terminal.print_table(out, terminal.table(title, columns, lines, left=2))
    out.print(environment.line(where))
    if busy:
        out.print(
            f"{cores} cores with a load of {load}: other programs slow this one down, so speeds would mean nothing and "
            "are left out; passes stay the same",
            style="bold yellow",
        )
        return
    for name, row in rows.items():
        if row["speed_up"] < LOSS:
            out.print(
                f"{name} loses to {PLAIN}: it gains {tokens_a_pass(row):.2f} tokens a pass, but a pass takes "
                f"{tokens_a_pass(row) / row['speed_up']:.1f} times as long{CURES.get(name, '')}"
            )


def tokens_a_pass(row: dict[str, Any]) -> float:
    """After the prompt's pass, which gives one token."""
    return row["accepted_length"] or 1.0


@torch.no_grad()
def differences(
    result: Race, base: PreTrainedModel, batches: list[dict[str, Tensor]], restored: list[int]
) -> tuple[list[str], list[str]]:
    """Where texts differ from transformers' own; and, separately, near ties, where the two likeliest tokens are so
    close that rounding in a pass of another shape may decide between them.

    restored: the first text, as generated with the restored head.
    """
    differing: list[str] = []
    ties: list[str] = []
    for name in result.runs:
        for i, row, at in result.differing(name, TRANSFORMERS):
            tokens = result.runs[TRANSFORMERS][0][i].output.tokens[row][:at]
            ids = torch.cat([batches[i]["input_ids"][row], torch.tensor(tokens, device=base.device, dtype=torch.long)])
            best = base(input_ids=ids.unsqueeze(0)).logits[0, -1].topk(2).values
            margin = float(best[0] - best[1])
            where = f"{name} on prompt {i + 1} from token {at + 1} on (the best two are {margin:.2g} apart)"
            (differing if margin > TIE else ties).append(where)
    if result.runs["head"][0][0].output.tokens[0] != restored:
        differing.append("the restored process wrote another text than the head does here")
    return differing, ties


def tell_differences(differing: list[str], ties: list[str], result: Race, out: Console) -> None:
    """Print the verdict in one line."""
    runs = result.runs[TRANSFORMERS][0]
    size = (
        f"{len(result.runs)} decoders × {len(runs)} prompts, {sum(r.num_tokens for r in runs)} tokens each, "
        "and the restored process"
    )
    if differing:
        out.print("✗ not every text is the same: " + "; ".join(differing + ties), style="bold red")
    elif ties:
        out.print(f"≈ every text is the same ({size}) but for near ties: " + "; ".join(ties), style="bold yellow")
    else:
        out.print(f"✓ every text is the same: {size}", style="bold green")
