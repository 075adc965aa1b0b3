"""lm-evaluation-harness on a SpecModel, beside its base. Not a test of the suite: it needs

    pip install lm_eval
    OMP_NUM_THREADS=1 PYTHONPATH=. python tests/third_party/run_lm_eval.py

A task made here asks the shipped base to continue files it has not seen, in batches of four. With drafts the answers
and log likelihoods are the base's; a lossy rule, given by gen_kwargs as any option of generate(), has others.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

import specheads
from specheads.bench.prompts import held_out_prompts
from specheads.data.corpus import checkpoints_dir

PROMPTS, TOKENS = 24, 48


def answers(model: Any, tokenizer: Any, task: dict[str, Any], **options: Any) -> list[str]:
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    found = simple_evaluate(
        model=harness, tasks=[task], gen_kwargs={"do_sample": False, **options}, bootstrap_iters=0, log_samples=True
    )
    return [sample["resps"][0][0] for sample in found["samples"][task["task"]]]


def likelihoods(model: Any, tokenizer: Any, prompts: list[str]) -> list[tuple[float, bool]]:
    asked = [Instance("loglikelihood", {}, (prompt, "\n\n"), i) for i, prompt in enumerate(prompts)]
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4).loglikelihood(asked)


def main() -> None:
    torch.set_num_threads(1)
    folder = checkpoints_dir()
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = specheads.SpecModel.from_pretrained(folder / "eagle3", dtype=torch.float32)
    prompts = held_out_prompts(tokenizer, PROMPTS)
    with tempfile.TemporaryDirectory() as temporary:
        rows = Path(temporary, "rows.jsonl")
        rows.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts), "utf8")
        task = {
            "task": "continue", "dataset_path": "json", "dataset_kwargs": {"data_files": str(rows)},
            "test_split": "train", "doc_to_text": "{{prompt}}", "doc_to_target": "", "output_type": "generate_until",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": TOKENS},
            "metric_list": [{"metric": "exact_match"}],
        }  # fmt: skip
        plain = answers(model.base, tokenizer, task)
        same = {
            "automatic drafts": answers(model, tokenizer, task) == plain,
            "the head's drafts": answers(model, tokenizer, task, draft="head") == plain,
            "log likelihoods": likelihoods(model, tokenizer, prompts) == likelihoods(model.base, tokenizer, prompts),
        }
        lossy = answers(model, tokenizer, task, draft="head", accept="typical:0.1")
    print({what: "as the base's" if equal else "OTHERS" for what, equal in same.items()})
    print(f"typical acceptance: {sum(a == b for a, b in zip(plain, lossy, strict=True))} of {PROMPTS} as the base's")
    assert all(same.values()) and lossy != plain


if __name__ == "__main__":
    main()
