"""The specheads command: one file per subcommand, the chat console and the demo."""
