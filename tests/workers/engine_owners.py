"""Processes that each serve an engine and then wait to be ended: python engine_owners.py PROGRAM FOLDER…

Each has a FOLDER for its temporary files, and writes the number of its process there once the engine answers.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

from specheads.audit.certificates.engines import Exported, engine_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without
exported = Exported(Path("/"), "base", "vllm", "eagle3", torch.float32, 1, (), "--speculative-config '{}' \n")
for folder in map(Path, sys.argv[2:]):
    if os.fork() == 0:
        tempfile.tempdir = str(folder)
        with engine_of(f"vllm={sys.argv[1]}").serve(exported):
            (folder / "owner.tmp").write_text(str(os.getpid()))
            (folder / "owner.tmp").rename(folder / "owner")
            signal.pause()
