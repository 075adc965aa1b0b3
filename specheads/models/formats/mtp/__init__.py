"""MTP modules as models ship them, in the checkpoints of the models themselves."""
