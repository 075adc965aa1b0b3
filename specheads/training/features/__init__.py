"""Features of a base, saved once and trained on without it: extract.py writes, dataset.py reads, model.py trains."""
