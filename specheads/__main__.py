"""`python -m specheads`: the command."""

from specheads.cli.program import main

main()
