"""The EAGLE repository with our exports, beside decoding here. Not a test of the suite: it needs

    python -m venv eagle
    eagle/bin/pip install torch==2.13.0
    eagle/bin/pip install transformers==4.53.3 accelerate
    git clone https://github.com/SafeAILab/EAGLE
    OMP_NUM_THREADS=1 PYTHONPATH=. python tests/third_party/run_eagle.py ours FOLDER
    OMP_NUM_THREADS=1 PYTHONPATH=EAGLE eagle/bin/python tests/third_party/run_eagle.py theirs FOLDER

The first run decodes here and exports; the second loads what the README of the export says, the base beside it
included, on a transformers that this library does not run on. Greedy chains of five in float32: the same text, and the
same tokens gained in every step. The EAGLE-3 head is the shipped one in its published form (taught.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

NUM_PROMPTS, NEW_TOKENS, DEPTH = 6, 64, 5
KINDS = ("eagle", "eagle3")


def ours(folder: Path) -> None:
    """Heads, prompts, and what decoding here gives, for the other program."""
    from transformers import AutoTokenizer

    from specheads import SpecModel, chain
    from specheads.bench.prompts import held_out_prompts
    from specheads.bench.shipped import held_out_names
    from specheads.data.corpus import checkpoints_dir
    from tests.third_party.taught import published

    base = checkpoints_dir() / "base"
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompts = [
        tokenizer(t)["input_ids"] for t in held_out_prompts(tokenizer, NUM_PROMPTS, held_out=held_out_names(base))
    ]
    record: dict[str, Any] = {"prompts": prompts}
    for kind in KINDS:
        model: Any = SpecModel.from_pretrained(checkpoints_dir() / kind, dtype=torch.float32)
        model = published(model, prompts) if kind == "eagle3" else model
        model.export(folder / kind, "eagle")
        texts, steps = [], []
        for ids in prompts:
            out = model.generate(
                torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, tree=chain(DEPTH),
                return_dict_in_generate=True,
            )  # fmt: skip
            texts.append(out.sequences[0, len(ids) :].tolist())
            steps.append([len(step.tokens[0]) for step in out.steps[1:]])
        record[kind] = {"texts": texts, "steps": steps}
    (folder / "ours.json").write_text(json.dumps(record))


def theirs(folder: Path) -> None:
    import transformers
    from eagle.model import ea_model
    from eagle.model.ea_model import EaModel

    record, wrong = json.loads((folder / "ours.json").read_text()), []
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for kind in KINDS:
        model = EaModel.from_pretrained(
            use_eagle3=kind == "eagle3", base_model_path=str(folder / kind / "base"), ea_model_path=str(folder / kind),
            total_token=DEPTH + 1, depth=DEPTH - 1, top_k=1, torch_dtype=torch.float32,
        ).eval()  # fmt: skip
        gained: list[int] = []
        judge = ea_model.evaluate_posterior

        def counting(*asked: Any, judge: Any = judge, gained: list[int] = gained) -> Any:
            found = judge(*asked)
            gained.append(int(found[1]) + 1)
            return found

        ea_model.evaluate_posterior = counting
        same, equal, rates = 0, 0, []
        for ids, text, steps in zip(record["prompts"], record[kind]["texts"], record[kind]["steps"], strict=True):
            gained.clear()
            out = model.eagenerate(torch.tensor([ids]), temperature=0, max_new_tokens=NEW_TOKENS, max_length=512)
            same += out[0, len(ids) : len(ids) + len(text)].tolist() == text
            # It goes on past the last token, which decoding here cuts its last step at.
            equal += gained[: len(steps) - 1] == steps[:-1]
            rates.append(sum(gained[: len(steps)]) / len(steps))
        ea_model.evaluate_posterior = judge
        print(
            f"{kind}: {same} of {NUM_PROMPTS} texts the same, {equal} with the same tokens gained in every step; "
            f"{sum(rates) / len(rates):.3f} tokens a step"
        )
        if (same, equal) != (NUM_PROMPTS, NUM_PROMPTS) or sum(rates) / len(rates) < 1.5:
            wrong.append(kind)
    if wrong:
        raise SystemExit(f"not as claimed: {', '.join(wrong)}")


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs}[sys.argv[1]](Path(sys.argv[2]))
