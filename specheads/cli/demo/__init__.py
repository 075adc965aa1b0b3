"""`specheads demo`: train, save, restore and race a head. story.py is the demo, live.py trains, race.py races."""
