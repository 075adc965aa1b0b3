"""What the `specheads` commands do once their arguments are read; specheads_cli reads them."""
