"""Certificates: what an exported head did in the engine that it was exported for."""
