"""Runs with several processes: what launchers start, and checkpoints under DeepSpeed and FSDP2."""

from specheads.training import require_extra

require_extra()
