"""Decode any Hugging Face model with drafts, nothing trained: the same text in fewer passes of the model.

python examples/generate.py [MODEL] [PROMPT]      # from a clone; MODEL: a folder or hub id
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import specheads

MODEL = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/base"  # a small model of Python source in the repository
PROMPT = sys.argv[2] if len(sys.argv) > 2 else 'def save_config(config, path):\n    """Save the configuration'

base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
inputs = tokenizer(PROMPT, return_tensors="pt")
options = {"max_new_tokens": 128, "do_sample": False}

began = time.perf_counter()
plain = base.generate(**inputs, **options)
plain_seconds = time.perf_counter() - began

# draft="lookup" copies what followed the last few tokens where they stood before; the model checks each copy.
began = time.perf_counter()
out = specheads.generate(
    base,
    **inputs,
    **options,
    draft="lookup",
    streamer=TextStreamer(tokenizer),  # pieces come as they are verified, several tokens at a time
    return_dict_in_generate=True,
)
seconds = time.perf_counter() - began

assert torch.equal(out.sequences, plain), "in float32 the text is the model's own, token for token"
figures = out.statistics()
print(f"{figures['accepted_length']:.2f} tokens a step, {figures['tokens']} tokens in {figures['steps'] + 1} passes")
print(f"{plain_seconds / seconds:.2f} times the speed of transformers' generate() in this one run")
