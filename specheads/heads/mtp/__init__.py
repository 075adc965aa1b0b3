"""MTP heads: modules built from the target's own decoder layer class."""
