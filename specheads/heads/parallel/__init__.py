"""The parallel block head and its options."""
