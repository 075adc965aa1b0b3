"""Which prompts of a batch are read in one pass: those of similar length, so that little of it is padding."""

from __future__ import annotations

from collections.abc import Sequence

SHORT_PROMPT = 64  # tokens: a pass over fewer takes about as long as one over so many
LEAST_FULL = 0.75  # of a group's longest prompt: the length of its shortest


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """The rows of a batch by the lengths of their prompts: in a group the shortest has at least LEAST_FULL of the
    longest's. One group if several would save less than a fifth of the positions."""
    padded = [max(length, SHORT_PROMPT) for length in lengths]
    groups: list[list[int]] = []
    for row in sorted(range(len(padded)), key=lambda row: -padded[row]):
        if groups and padded[row] >= LEAST_FULL * padded[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    read = sum(len(group) * padded[group[0]] for group in groups)
    return groups if read < 0.8 * len(padded) * max(padded) else [list(range(len(padded)))]
