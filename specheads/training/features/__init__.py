"""Features of a base, saved once and trained on without it: extract.py writes, dataset.py reads, model.py trains."""

from specheads.training import require_extra

require_extra()
