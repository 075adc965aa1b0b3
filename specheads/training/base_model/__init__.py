"""Training a small base model and its tokenizer from scratch on source code: train/base_model.py, `specheads demo`."""
