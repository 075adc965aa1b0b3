"""Layers that heads are made of: decoder layers, feed-forward blocks and rotary embeddings."""
