"""`python -m specheads_cli`: the command, without waiting for torch where it is not needed."""

from specheads_cli import main

main()
