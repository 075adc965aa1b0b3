"""The target model: its passes over draft trees, and their key-value caches."""
