"""Turns rows from files, folders, the hub or memory into batches of token ids and labels."""
