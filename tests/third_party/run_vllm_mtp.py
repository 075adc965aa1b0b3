"""vLLM 0.32 serving MTP modules exported `--to mtp`, beside decoding here. Not a test of the suite: it needs the
environment of run_vllm.py, and

    OMP_NUM_THREADS=1 PYTHONPATH=. vllm/bin/python tests/third_party/run_vllm_mtp.py [FAMILY ...]

Each family is a random model of toy size whose checkpoint holds modules (tests/support/shipped_mtp.py). They are taught
on what the model writes itself, exported, and draft chains in both programs, greedily and in float32. The text must be
the same token for token, and so must the accepted drafts at every depth be where heads here are told to read what vLLM
reads (VLLM): for some families that is not what they read by themselves. They must not be ours where the two halves of
the projection are exchanged in the file. The last result is in docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as hf_logging

from specheads import SpecModel, convert
from specheads.bench import report
from specheads.heads import MtpHead
from tests.support import shipped_mtp
from tests.third_party.run_vllm import COUNTER, NEW_TOKENS, decoded, row
from tests.third_party.taught import taught

NUM_PROMPTS, PROMPT, DRAFTED = 8, 12, 3
# Heads of attention as vLLM's kernels for CPUs take them.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
# Family → sizes, keys of the published models' configs, and how vLLM reads the modules otherwise than heads here:
# zero_first_embedding and norm_output are options of the head, before_norm is whether the target's hidden state is read
# before its final norm.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, bool]]] = {
    "exaone_moe": ({}, {}, {}),
    "glm4_moe": ({"n_shared_experts": 1}, {}, {"zero_first_embedding": True, "norm_output": False}),
    "mimo": (
        {"num_nextn_predict_layers": 2}, {"architectures": ["MiMoForCausalLM"]},
        {"zero_first_embedding": True, "before_norm": True},
    ),
}  # fmt: skip


def served(folder: Path, prompts: list[list[int]], drafted: int) -> dict[str, Any]:
    """vLLM's texts and its counters. To run in a process of its own: it keeps global state."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    speculative = {"method": "mtp", "num_speculative_tokens": drafted}
    llm = LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=1, disable_log_stats=False,
        skip_tokenizer_init=True, speculative_config=speculative,
    )  # fmt: skip
    asked = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    out = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    counted = {m.name.removeprefix(COUNTER): m for m in llm.get_metrics() if m.name.startswith(COUNTER)}
    return {
        "texts": [list(one.outputs[0].token_ids) for one in out],
        "steps": counted["drafts"].value,
        "accepted": counted["accepted_tokens"].value,
        "by_depth": list(counted["accepted_tokens_per_pos"].values),
    }


def target(family: str, folder: Path) -> Path:
    """A target with modules, whose norms are not all ones: a norm more or less would not show otherwise."""
    sizes, published, _ = FAMILIES[family]
    shipped_mtp.write(folder, family, **{**SIZES, "initializer_range": 0.1, **sizes})
    path, generator = folder / "model-00001-of-00002.safetensors", torch.Generator().manual_seed(3)
    tensors = load_file(path)
    for name, tensor in sorted(tensors.items()):
        if "norm" in name and tensor.ndim == 1:
            tensors[name] = 1 + torch.randn(tensor.shape, generator=generator) * 0.3
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | published))
    return folder


def as_vllm_reads(model: SpecModel, before_norm: bool = False, **options: bool) -> SpecModel:
    """The first module alone, fed with itself, which is all that vLLM 0.32 uses; and what it reads otherwise."""
    config = replace(model.head.config, num_modules=1, **options)
    other = convert(model.base, config, dtype=torch.float32)
    other.head.load_state_dict({n: t for n, t in model.head.state_dict().items() if n.startswith("mtp.0.")})
    if before_norm:  # the norm's weights are divided out, and the scale does not matter to the module's own norm
        read, weight = MtpHead.read_committed, model.base.model.norm.weight
        other.head.read_committed = lambda context, hidden, *rest: read(other.head, context, hidden / weight, *rest)
    return other.eval()


def exchanged(folder: Path, model: SpecModel) -> Path:
    """An export whose projections read the embedding where the hidden state is, and the reverse."""
    out = model.export(folder, "mtp")
    tensors = load_file(out / "mtp.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("eh_proj.weight", "mtp.fc.weight", "input_proj.weight")):
            tensors[name] = torch.cat(tensor.chunk(2, 1)[::-1], 1).contiguous()
    save_file(tensors, out / "mtp.safetensors", metadata={"format": "pt"})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"some of: {'; '.join(FAMILIES)} (default: all)")
    given = parser.parse_args().families
    if unknown := set(given) - FAMILIES.keys():
        parser.error(f"{sorted(unknown)[0]!r} is none of {'; '.join(FAMILIES)}")
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    print(f"vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}")
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, shipped_mtp.V, (NUM_PROMPTS, PROMPT), generator=generator).tolist()
    lines, failed = [], []
    for family in given or FAMILIES:
        place = Path(tempfile.mkdtemp())
        model = taught(SpecModel.from_pretrained(target(family, place / "target")), prompts, 60, 5e-3)
        modules = model.head.config.num_modules
        drafted = DRAFTED if DRAFTED % modules == 0 else 2 * modules  # vLLM wants a multiple
        ours, theirs_here = decoded(model, prompts, drafted), as_vllm_reads(model, **FAMILIES[family][2])
        same_reading = decoded(theirs_here, prompts, drafted)
        forms = {"": model.export(place / family, "mtp"), ", halves exchanged": exchanged(place / f"x {family}", model)}
        for suffix, out in forms.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
                theirs = alone.submit(served, out, prompts, drafted).result()
            shown = row(family + suffix, theirs, same_reading)
            lines.append([*shown, " ".join(map(str, ours["by_depth"]))])
            print("; ".join(lines[-1]), flush=True)
            equal = (theirs["steps"], theirs["by_depth"]) == (same_reading["steps"], same_reading["by_depth"])
            if theirs["texts"] != ours["texts"] or equal != (not suffix):
                failed.append(family + suffix)
    head = ("family", "same text", "steps", "accepted a step", "accepted by depth", "by depth, as heads here read")
    print(
        f"{NUM_PROMPTS} prompts × {NEW_TOKENS} tokens, greedy chains; vLLM's figure first, then ours read as vLLM does"
    )
    print(report.markdown(head, lines))
    if failed:
        raise SystemExit(f"not as claimed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
