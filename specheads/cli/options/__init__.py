"""The options of every command: dataclasses from which app.py makes the command line, without torch."""
