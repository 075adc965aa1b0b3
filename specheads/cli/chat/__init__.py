"""`specheads chat`: the console. A prompt is answered by several ways of decoding, which are then compared."""
