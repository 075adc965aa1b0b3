"""The model whose text is wanted: its passes over draft trees, and the key-value caches behind them."""
