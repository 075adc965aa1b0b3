"""`specheads demo`: the whole line in minutes. story.py tells it, live.py trains, restored.py is the new process."""
