"""What `specheads bench` records of a run, the file it is kept in, and the figures computed from it."""
