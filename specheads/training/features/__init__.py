"""What a base saw, saved once and trained on without it: extract.py writes, dataset.py reads, model.py trains."""
