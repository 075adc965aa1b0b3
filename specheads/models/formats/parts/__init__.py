"""Translations that several formats share: the decoder block, layer numbers, rotary positions, the draft vocabulary."""
