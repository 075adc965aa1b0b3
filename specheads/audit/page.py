"""The evidence of an audit as one page of Markdown."""

from __future__ import annotations

from specheads.audit.acceptance import Comparison
from specheads.audit.verdict import AuditReport, Result, Verdict

FIGURES = {
    "misses": "tokens that are not the argmax",
    "largest_gap": "largest gap of logits to the argmax",
    "margin": "gap that rounding explains",
    "z": "z of the log-likelihood",
    "rank_distance": "distance of the ranks to uniform",
    "rank_bound": "the same, exceeded by 1 in 1,000 right servers",
    "log_evidence": "log of the evidence against a right server",
}


def markdown(report: AuditReport, base: str, comparison: Comparison | None = None) -> str:
    """base: as it was given. Figures beside the verdict are looked at once; the verdict rests on the evidence."""
    lines = [
        f"# Audit of {report.server}", "",
        f"**{report.verdict}**: is its text that of `{base}`? A right server is called not lossless with a chance of "
        f"at most {report.alpha:g}.", "",
        "| asked for | verdict | texts | tokens | chance under a right server | found with 95 % |",
        "|---|---|---|---|---|---|", *map(_row, report.results), "",
    ]  # fmt: skip
    for result in report.results:
        lines += [f"## {result.settings}", ""]
        if result.mistake:
            lines += [f"This is {result.mistake}.", ""]
        if result.evidence:
            lines += [*(f"- {line}" for line in result.evidence), ""]
        if result.figures:
            lines += ["| figure | value |", "|---|---|"]
            lines += [f"| {FIGURES.get(name, name)} | {value:.3g} |" for name, value in result.figures.items()] + [""]
        if result.by_place:
            names = list(next(iter(result.by_place.values())))
            lines += [f"| where a token is | {' | '.join(FIGURES.get(name, name) for name in names)} |"]
            lines += ["|---" * (1 + len(names)) + "|"]
            for place, row in result.by_place.items():
                lines += [f"| {place} | {' | '.join(f'{row[name]:.3g}' for name in names)} |"]
            lines += [""]
    if comparison is not None:
        depths = range(max(len(side.by_depth) for side in (comparison.server, comparison.ours)))
        lines += [
            "## Accepted drafts", "",
            f"| | steps | tokens a step |{''.join(f' depth {d + 1} |' for d in depths)}",
            "|---|---|---|" + "---|" * len(depths),
        ]  # fmt: skip
        for name, side in (("server", comparison.server), ("here", comparison.ours)):
            shares = [f" {n / side.steps:.3f} |" for n in side.by_depth] or [" |"] * len(depths)
            lines.append(f"| {name} | {side.steps:,} | {side.tokens_per_step:.3f} |{''.join(shares)}")
        if comparison.by_position:
            lines += ["", "| from output position | tokens a step, server | here |", "|---|---|---|"]
            lines += [
                f"| {start} | {part.server.tokens_per_step:.3f} | {part.ours.tokens_per_step:.3f} |"
                for start, part in comparison.by_position.items()
            ]
        lines += ["", *comparison.words(), ""]
    return "\n".join(lines)


def _row(result: Result) -> str:
    power = "" if result.verdict is Verdict.NOT_LOSSLESS or result.mistake else f"{result.power:.1%} of the tokens"
    chance = f"{result.chance:.1g}" if result.verdict is Verdict.NOT_LOSSLESS else ""
    verdict = "undecided" if result.mistake else str(result.verdict)
    return f"| {result.settings} | {verdict} | {result.texts:,} | {result.tokens:,} | {chance} | {power} |"
