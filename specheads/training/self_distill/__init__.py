"""Rows in the target's own words: the questions, who answers them (local or served), and the output file."""
