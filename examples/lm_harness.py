"""Evaluate a model in lm-evaluation-harness with drafted answers: the same answers, counted in tokens a step.

pip install lm_eval
python examples/lm_harness.py [BASE] [HEAD] [TASK]
"""

import sys
import time

import lm_eval
from lm_eval.models.huggingface import HFLM

from specheads.compat.harness import DraftedLM

BASE = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/base"
HEAD = sys.argv[2] if len(sys.argv) > 2 else "checkpoints/eagle3"
TASK = sys.argv[3] if len(sys.argv) > 3 else "gsm8k"  # a task whose answers are generated
OPTIONS = {"dtype": "float32", "device": "cpu", "batch_size": 1}

answers, seconds = {}, {}
for name, model in {"hf": HFLM(BASE, **OPTIONS), "specheads": DraftedLM(BASE, head=HEAD, **OPTIONS)}.items():
    began = time.perf_counter()
    results = lm_eval.simple_evaluate(model=model, tasks=[TASK], limit=4)
    seconds[name] = time.perf_counter() - began
    answers[name] = [sample["resps"] for sample in results["samples"][TASK]]
    print(name, results["results"][TASK])

assert answers["hf"] == answers["specheads"], "in float32 the answers are the model's own"
count = model.statistics
print(f"{count['tokens'] / count['row_steps']:.2f} tokens a step")
print(f"{seconds['hf'] / seconds['specheads']:.2f} times as fast in this one run")
