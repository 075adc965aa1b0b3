"""Parallel block heads on disk: DFlash, JetSpec and DSpark, a file a form; parallel.py is what the forms share."""
