"""A run, a bench or a tune file as one HTML file that needs no network."""
