"""MTP heads: modules of the decoder layer of the target's own class."""
