"""A base and its draft head as one model: built by convert(), saved, loaded, quantised, written in other formats."""
