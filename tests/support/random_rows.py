"""Rows of ids in which long runs repeat, and where a suffix of a row ends."""


def random_row(rng, alphabet, length):
    """Ids with runs copied from earlier on, so that long suffixes repeat."""
    row = []
    while len(row) < length:
        if row and rng.random() < 0.3:
            start = rng.randrange(len(row))
            row += row[start : start + rng.randint(1, 8)]
        else:
            row.append(rng.randrange(alphabet))
    return row[:length]


def ends_of(row, suffix):
    """Where the suffix ends in the row, the row's own end left out."""
    return [end for end in range(len(suffix), len(row)) if row[end - len(suffix) : end] == suffix]
