"""Rows in the target's own words: what is asked, by whom it is answered, and the file the answers go to."""
