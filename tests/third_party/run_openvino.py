"""OpenVINO GenAI 2026.4 with an EAGLE-3 head and a DFlash head, beside decoding here. Not a test of the suite: it needs

    python -m venv ov
    ov/bin/pip install torch==2.13.0 torchvision==0.28.0 optimum-intel==2.2.0 openvino-genai==2026.4.1.0 \\
        transformers==5.5.4 diffusers==0.37.1 einops "huggingface_hub<1.22"
    ov/bin/pip uninstall -y torchvision
    OMP_NUM_THREADS=1 PYTHONPATH=. python tests/third_party/run_openvino.py ours FOLDER
    OMP_NUM_THREADS=1 PATH=ov/bin:$PATH ov/bin/python tests/third_party/run_openvino.py theirs FOLDER

The EAGLE-3 head is the shipped one in its published form, which is what OpenVINO holds: without norm_before_residual,
taught for a minute what that changes (taught.py), as the DFlash head is from the start.

The first run decodes here, with a chain, an EAGLE-2 tree and blocks, and exports; the second converts with
optimum-intel, whose transformers this library does not run on, and decodes the same prompts: the same text, the same
tokens gained in every step, and other steps where the layers are left to OpenVINO GenAI. The last result is in
docs/compatibility.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

NUM_PROMPTS, NEW_TOKENS, DEPTH, NODES, WIDTH = 6, 64, 5, 16, 4
PLANS = {
    "chain": {"num_assistant_tokens": DEPTH},
    "tree": {"num_assistant_tokens": NODES, "tree_depth": DEPTH, "branching_factor": WIDTH},
}
BLOCK = {"block": {"num_assistant_tokens": 4}}  # all that a block of five drafts
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # the cache has eight bits by default


def ours(folder: Path) -> None:
    """Base, head, prompts and what decoding here gives, for the other program."""
    import torch
    from transformers import AutoTokenizer

    from specheads import DynamicTree, SpecModel, chain
    from specheads.bench.prompts import held_out_prompts
    from specheads.bench.shipped import held_out_names
    from specheads.data.corpus import checkpoints_dir
    from tests.third_party.taught import DFLASH, SLOTS, blocks, published

    base = checkpoints_dir() / "base"
    model = SpecModel.from_pretrained(checkpoints_dir() / "eagle3", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model.base.float().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    texts = held_out_prompts(tokenizer, NUM_PROMPTS, held_out=held_out_names(base))
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    model = published(model, prompts)
    model.export(folder / "head", "eagle", embeddings=True)
    record: dict[str, Any] = {"prompts": prompts, "layers": model.head.layers}
    dflash = blocks(model.base, prompts, DFLASH)
    dflash.export(folder / "dflash", "openvino")
    for name, plan in {
        "chain": chain(DEPTH),
        "tree": DynamicTree(NODES + 1, DEPTH, WIDTH),
        "block": chain(SLOTS - 1),
    }.items():
        drafting = dflash if name == "block" else model
        found, steps = [], []
        for ids in record["prompts"]:
            out = drafting.generate(
                torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, tree=plan,
                return_dict_in_generate=True,
            )  # fmt: skip
            found.append(out.sequences[0, len(ids) :].tolist())
            steps.append([len(step.tokens[0]) for step in out.steps])
        record[name] = {"texts": found, "steps": steps}
    (folder / "ours.json").write_text(json.dumps(record))


def convert(source: Path, out: Path) -> None:
    command = ["optimum-cli", "export", "openvino", "--model", source, "--task", "text-generation-with-past"]
    subprocess.run([*command, "--trust-remote-code", "--weight-format", "fp32", out], check=True)


def name_layers(draft: Path, layers: list[int]) -> None:
    """hidden_states as Hugging Face numbers them, into the converted head: GenAI's i is the output of layer i."""
    path = draft / "openvino_model.xml"
    mode, text = '<eagle3_mode value="True" />', path.read_text("utf8")
    assert text.count(mode) == 1
    listed = " ".join(str(layer - 1) for layer in layers)
    path.write_text(text.replace(mode, f'{mode}<hidden_layers_list value="{listed}" />'), "utf8")


def decoded(base: Path, draft: Path, prompts: list[list[int]], plan: dict[str, int]) -> dict[str, Any]:
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # which its DFlash refuses
    pipe = openvino_genai.LLMPipeline(
        str(base), "CPU", draft_model=openvino_genai.draft_model(str(draft), "CPU", **EXACT),
        scheduler_config=scheduler, **EXACT,
    )  # fmt: skip
    asked = openvino_genai.GenerationConfig()
    asked.max_new_tokens, asked.ignore_eos, asked.do_sample, asked.apply_chat_template = NEW_TOKENS, True, False, False
    for name, value in plan.items():
        setattr(asked, name, value)
    outs = [pipe.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), asked) for ids in prompts]
    metrics = [out.extended_perf_metrics.main_model_metrics.raw_metrics for out in outs]
    return {"texts": [list(out.tokens[0]) for out in outs], "steps": [list(m.m_batch_sizes) for m in metrics]}


def theirs(folder: Path) -> None:
    names = ("openvino-genai", "optimum-intel", "transformers", "torch")
    print(", ".join(f"{name} {version(name)}" for name in names))
    record = json.loads((folder / "ours.json").read_text())
    convert(folder / "base", folder / "ov-base")
    convert(folder / "head", folder / "ov-usual")
    convert(folder / "head", folder / "ov-head")
    convert(folder / "dflash", folder / "ov-dflash")
    name_layers(folder / "ov-head", record["layers"])
    wrong = []
    for draft, exact, plans in (
        ("ov-head", True, PLANS), ("ov-usual", False, PLANS), ("ov-dflash", True, BLOCK),
    ):  # fmt: skip
        for name, plan in plans.items():
            found, own = decoded(folder / "ov-base", folder / draft, record["prompts"], plan), record[name]
            same = sum(one == other for one, other in zip(found["texts"], own["texts"], strict=True))
            # the first step of each is the prefill
            rates = [
                sum(sum(row[1:]) for row in f["steps"]) / sum(len(row) - 1 for row in f["steps"]) for f in (found, own)
            ]
            print(
                f"{draft}, {name}: {same} of {len(own['texts'])} texts the same; tokens a step {rates[0]:.3f}, ours "
                f"{rates[1]:.3f}; the same tokens in every step: {found['steps'] == own['steps']}"
            )
            if found["texts"] != own["texts"] or (found["steps"] == own["steps"]) != exact:
                wrong.append(f"{draft}, {name}")
    if wrong:
        raise SystemExit(f"not as claimed: {'; '.join(wrong)}")


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs}[sys.argv[1]](Path(sys.argv[2]))
