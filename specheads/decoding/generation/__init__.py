"""Around the loop: generate() with the options of transformers, prompts in batches, and what it returns."""
