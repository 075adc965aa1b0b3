"""Fitting a trained head to its user's own sessions, measured before and after."""
