"""What `specheads bench` and sweeps record of a run, the file it is kept in, and the figures computed from it."""
