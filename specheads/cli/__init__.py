"""The `specheads` command: program.py runs it, app.py makes each command of a dataclass in options/, commands/ works.

Nothing here imports torch before a command has parsed its arguments, so --help is quick.
"""
