"""`specheads doctor`: what is installed, and what will be fast or slow on this machine."""
