"""Does a server write its model's text? Checks of its tokens against the base's logits, clients, and verdicts."""
