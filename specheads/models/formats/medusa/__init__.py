"""Medusa and Hydra heads on disk, one file per format."""
