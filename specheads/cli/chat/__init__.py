"""`specheads chat`: the console. Several ways of decoding answer each prompt and are then compared."""
