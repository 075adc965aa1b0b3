"""What the commands do with the options that were parsed."""
