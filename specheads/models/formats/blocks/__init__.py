"""Parallel block heads on disk: DFlash, JetSpec and DSpark, one file per format; parallel.py has what they share."""
