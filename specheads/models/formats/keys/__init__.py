"""The keys of foreign configs: which are read, which change nothing, and which name a kind of head not read here."""
