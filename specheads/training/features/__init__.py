"""What a base saw, saved once and trained on without it: dump.py writes, dataset.py reads, model.py trains."""
