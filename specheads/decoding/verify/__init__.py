"""The target model: its passes over draft trees, and its key-value caches."""
