"""A base and its draft head as one model: converting, saving, loading, quantising, exporting to other formats."""
