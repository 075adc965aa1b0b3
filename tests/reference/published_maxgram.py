"""MaG as published: matched and copied one step after another."""

from tests.support.random_rows import ends_of


def published(haystack, k, bigrams):
    """CS Drafting's steps: match the longest suffix, copy what followed it first; again while short; then bigrams."""
    ids = list(haystack)
    while len(ids) < len(haystack) + k:
        for length in range(len(ids) - 1, 0, -1):
            if ends := ends_of(ids, ids[-length:]):
                short = len(haystack) + k - len(ids)
                ids += ids[ends[0] : ends[0] + short]
                break
        else:
            break
    while len(ids) < len(haystack) + k and bigrams[ids[-1]]:
        ids.append(bigrams[ids[-1]])
    return ids[len(haystack) :]
