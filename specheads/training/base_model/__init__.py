"""A small base model and its tokenizer from scratch, on source code: train/base_model.py, and `specheads demo`."""
