"""One file a kind of server: how it is asked for tokens."""
