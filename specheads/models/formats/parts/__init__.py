"""What several formats translate alike: the decoder block, layer numbers, rotary positions, the draft vocabulary."""
