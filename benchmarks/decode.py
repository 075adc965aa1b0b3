"""`specheads bench`, greedy, at batch 1, 4 and 8: how fast the shipped heads are. Options are those of the command.

python benchmarks/decode.py --num-prompts 8 --out runs/decode
"""

import sys

from specheads_cli import run

sys.exit(run(["bench", "--batch", "1,4,8", "--temperature", "0", *sys.argv[1:]]))
