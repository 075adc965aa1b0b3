"""MTP modules as they ship inside a model's own checkpoint."""
