"""What the `specheads` commands do once specheads_cli has parsed their arguments."""
