"""train/heads.py under FSDP2 on CPUs, see tests/support/fsdp2.py."""

import sys
from pathlib import Path
from unittest import mock

from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "train"))
import heads

from specheads.cli.commands import train as command
from tests.support.fsdp2 import fsdp2_on_cpu

checks = []


def prepare(recipe):
    """Every parameter is sharded whenever an evaluation begins, which may leave some unsharded after it."""
    run = prepare_run(recipe)
    evaluate = run.trainer.evaluate

    def checked(*args, **kwargs):
        whole = [name for name, p in run.trainer.model.named_parameters() if not isinstance(p, DTensor)]
        assert not whole, f"not sharded: {whole}"
        checks.append(run)
        return evaluate(*args, **kwargs)

    run.trainer.evaluate = checked
    return run


prepare_run = command.prepare
with fsdp2_on_cpu(), mock.patch.object(command, "prepare", prepare):
    code = heads.main()
assert checks or code
sys.exit(code)
