"""The speed of the shipped heads: `specheads bench`, greedy, at batch 1, 4 and 8. Takes the command's options.

python benchmarks/decode.py --num-prompts 8 --out runs/decode
"""

import sys

from specheads.cli.program import run

sys.exit(run(["bench", "--batch", "1,4,8", "--temperature", "0", *sys.argv[1:]]))
