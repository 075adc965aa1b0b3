"""What a run reports: its log lines, its curves, its model card."""
