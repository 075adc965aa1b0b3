"""`specheads chat`: console.py reads and shows, session.py answers, settings.py says what a command may change."""
