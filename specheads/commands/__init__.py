"""What the `specheads` commands do once their arguments are read; specheads_cli.py reads them."""
