"""`python -m specheads`: the command. It waits for torch even with --help, since Python imports the package first; the
program `specheads`, and `python -m specheads_cli`, do not."""

from specheads_cli import main

main()
