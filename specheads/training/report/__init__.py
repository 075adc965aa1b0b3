"""What a run shows: its log lines, its curves, its model card."""
