"""Runs with several processes: what launchers start, and checkpoints under DeepSpeed and FSDP2."""
