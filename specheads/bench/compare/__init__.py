"""`specheads bench`: decoders × prompt sets × batch sizes × temperatures, in one process, as tables and files."""
