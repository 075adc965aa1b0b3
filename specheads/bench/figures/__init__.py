"""What is kept of a run, in which file, and the figures that follow from it: of `specheads bench` and of sweeps."""
