from specheads_cli import main

main()
