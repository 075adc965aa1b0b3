"""From files, folders, the hub or memory to batches of token ids and labels."""
