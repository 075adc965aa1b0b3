"""FSDP2 on CPUs, over gloo, which torch can do and accelerate does not offer.

accelerate makes FSDP of a run on several accelerators only, and plain DDP of the same configuration on CPUs.
"""

import os
from contextlib import contextmanager
from unittest import mock

import yaml
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.support.paths import ROOT


@contextmanager
def fsdp2_on_cpu():
    """In the block accelerate makes FSDP2 of a run that is configured so."""
    accelerate_makes_state = AcceleratorState.__init__

    def make_state(self, *args, fsdp_plugin=None, **kwargs):
        accelerate_makes_state(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
                fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # it is pinned for a GPU
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with mock.patch.object(AcceleratorState, "__init__", make_state):
        yield


def configured(**changes):
    """The environment that `accelerate launch` makes of recipes/accelerate/fsdp2.yaml, with changes."""
    options = yaml.safe_load((ROOT / "recipes" / "accelerate" / "fsdp2.yaml").read_text())["fsdp_config"] | changes
    words = {
        name.upper(): str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()
    }
    return mock.patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "true", **words})
