"""`specheads demo`: train, save, restore and race a head in minutes. story.py is the demo, live.py its training."""
