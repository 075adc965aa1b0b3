"""The specheads command: one file a subcommand, the chat console and the demo."""
