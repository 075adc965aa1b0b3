"""train/heads.py under FSDP2 on CPUs, over gloo, which torch can do and accelerate does not offer.

accelerate makes FSDP of a run on several accelerators only, and plain DDP of the same configuration on CPUs.
"""

import sys
from pathlib import Path
from unittest import mock

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "train"))
import heads

from specheads.cli.commands import train as command

accelerate_makes_state = AcceleratorState.__init__


def make_state(self, *args, fsdp_plugin=None, **kwargs):
    accelerate_makes_state(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # it is pinned for a GPU
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


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
with mock.patch.object(AcceleratorState, "__init__", make_state), mock.patch.object(command, "prepare", prepare):
    code = heads.main()
assert checks or code
sys.exit(code)
