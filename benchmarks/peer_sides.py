"""One program's side of benchmarks/peers.py, run by that program's own Python: build its head, train it, save it.

    python benchmarks/peer_sides.py JOB.json

Every side sees the same batches in the same order and takes the same optimizer steps, in float32. Each line of standard
input is a number of steps to take; the answer, in a file, has their CPU seconds, and the rate at which the machine
multiplies matrices at that time. When its input ends, it saves the head in `out`, in the program's own format, and
writes `out`/figures.json.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM

Job = dict[str, Any]
Loss = Callable[[Tensor], Tensor]  # ids (B, T) → the loss of one step, including the base's forward


def base_model(job: Job) -> Any:
    return AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)


# -------------------------------------------------------------------------------------------------------------- sides


def specheads_side(job: Job, counts: Tensor) -> tuple[Any, Loss, Callable[[Path], Any]]:
    import specheads

    base = base_model(job)
    if job["head"] == "medusa":
        model = specheads.convert(base, "medusa", num_heads=job["depth"], anchors=job["anchors"])
    else:
        size, anchors = job["draft_vocab_size"], job["anchors"]
        model = specheads.convert(
            base, "eagle3", steps=job["depth"], draft_vocab_size=size, anchors=anchors,
            norm_before_residual=job["normed"],
        )  # fmt: skip
        model.head.set_draft_vocabulary(counts, base)

    def loss(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    return model, loss, model.save_pretrained


def modelopt_side(job: Job, counts: Tensor) -> tuple[Any, Loss, Callable[[Path], Any]]:
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.speculative.config import eagle3_default_config

    model = base_model(job)
    if job["head"] == "medusa":
        for parameter in model.parameters():  # ModelOpt's conversion leaves the base trainable
            parameter.requires_grad_(False)
        mtsp.convert(model, [("medusa", {"medusa_num_heads": job["depth"], "medusa_num_layers": 1})])

        def medusa_loss(ids: Tensor) -> Tensor:
            following = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)  # it counts from the next token
            return model(input_ids=ids, labels=following).loss

        def save_medusa(out: Path) -> None:
            heads = {
                name.removeprefix("medusa_heads."): t for name, t in model.state_dict().items() if "medusa" in name
            }
            save_file(heads, out / "medusa_lm_head.safetensors")
            shape = {"medusa_num_heads": job["depth"], "medusa_num_layers": 1, "base_model_name_or_path": job["base"]}
            (out / "config.json").write_text(json.dumps(shape))

        return model, medusa_loss, save_medusa

    of = model.config
    block = {
        "num_attention_heads": of.num_attention_heads, "num_key_value_heads": of.num_key_value_heads,
        "head_dim": of.head_dim, "intermediate_size": of.intermediate_size, "rms_norm_eps": of.rms_norm_eps,
        "rope_scaling": {"rope_type": "default", "rope_theta": of.rope_parameters["rope_theta"]},
        "rope_theta": of.rope_parameters["rope_theta"], "torch_dtype": "float32",
        "draft_vocab_size": job["draft_vocab_size"],
    }  # fmt: skip
    config = {
        "eagle_architecture_config": eagle3_default_config | block, "eagle_ttt_steps": job["depth"],
        "eagle_use_torch_compile": job["compile"], "eagle_mix_hidden_states": job["mixed"],
        "eagle_export_rope_scaling": {},
    }  # fmt: skip
    mtsp.convert(model, [("eagle", config)])
    model.eagle_module.d2t.copy_(most_frequent(counts, job) - torch.arange(job["draft_vocab_size"]))

    def eagle_loss(ids: Tensor) -> Tensor:
        return model(input_ids=ids).loss

    return model, eagle_loss, lambda out: model.get_exporter().export(out, torch.float32)


def speculators_side(job: Job, counts: Tensor) -> tuple[Any, Loss, Callable[[Path], Any]]:
    """speculators' trainer reads hidden states from files; here the base computes them, as for the others, with hooks
    that keep only those needed."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel

    base = base_model(job).eval()
    kept, t2d = most_frequent(counts, job), torch.zeros(len(counts), dtype=torch.bool)
    t2d[kept] = True
    block = AutoConfig.from_pretrained(job["base"])
    block.num_hidden_layers, block.tie_word_embeddings = 1, False
    layers = base.config.num_hidden_layers
    taps = (2, layers // 2, layers - 3)
    model = Eagle3DraftModel.from_training_args(
        block, t2d=t2d, d2t=kept - torch.arange(len(kept)), draft_vocab_size=len(kept),
        norm_before_residual=job["normed"], ttt_steps=job["depth"], verifier_name_or_path=job["base"],
        target_layer_ids=list(taps), draft_attn_impl="sdpa",
    ).float()  # fmt: skip
    losses = resolve_loss_config("kl_div", "eager")  # the fused kernels are for GPUs
    seen: dict[int, Tensor] = {}
    for tap in (*taps, layers):
        module = base.model.layers[tap - 1]
        module.register_forward_hook(lambda module, given, out, tap=tap: seen.__setitem__(tap, out))

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            base.model(input_ids=ids, use_cache=False)
        rows, length = ids.shape

        def packed(values: Tensor, shift: int) -> Tensor:
            # As speculators' collator aligns them: features of all but the last token, each with the next token.
            return values[:, shift : length - 1 + shift].reshape(1, rows * (length - 1), *values.shape[2:])

        documents = torch.arange(rows).repeat_interleave(length - 1).unsqueeze(0)
        positions = torch.arange(1, length).repeat(rows).unsqueeze(0)
        _, total, _ = model(
            hidden_states=packed(torch.cat([seen[tap] for tap in taps], -1), 0), input_ids=packed(ids, 1),
            verifier_last_hidden_states=packed(seen[layers], 1), document_ids=documents, position_ids=positions,
            loss_mask=torch.ones_like(documents, dtype=torch.bool), ttt_steps=job["depth"], loss_config=losses,
        )  # fmt: skip
        return total

    return model, loss, model.save_pretrained


def most_frequent(counts: Tensor, job: Job) -> Tensor:
    """The draft vocabulary that specheads chooses: target ids in ascending order."""
    return counts.argsort(descending=True, stable=True)[: job["draft_vocab_size"]].sort().values


SIDES = {"specheads": specheads_side, "modelopt": modelopt_side, "speculators": speculators_side}
DISTRIBUTIONS = {"specheads": "specheads", "modelopt": "nvidia-modelopt", "speculators": "speculators"}


# ----------------------------------------------------------------------------------------------------------- training


def run(job: Job) -> dict[str, Any]:
    torch.manual_seed(job["seed"])
    given = load_file(job["batches"])
    model, loss_of, save = SIDES[job["side"]](job, given["counts"])
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    losses: list[float] = []
    shape = AutoConfig.from_pretrained(job["base"])

    def step() -> float:
        ids, done = given["ids"][len(losses)], len(losses)
        for group in optimizer.param_groups:
            group["lr"] = job["learning_rate"] * min(1.0, (done + 1) / 5) * (1 - done / len(given["ids"]))
        begun = time.process_time()
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.process_time() - begun
        losses.append(loss.item())
        return seconds

    for line in sys.stdin:
        rate = product_rate(given["ids"][0].numel(), shape)
        answer({"seconds": [step() for _ in range(int(line))], "product_rate": rate}, Path(job["answer"]))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    with torch.compiler.set_stance("force_eager"):  # counters cannot look into compiled code
        with live_memory(job)() as memory:
            loss_of(given["ids"][0]).backward()
        with Products() as products:
            loss_of(given["ids"][0]).backward()
    save(Path(job["out"]))
    return {
        "versions": {
            name: version(name) for name in (DISTRIBUTIONS[job["side"]], "torch", "transformers")
        },
        "parameters": sum(parameter.numel() for parameter in trained),
        "step_flops": products.flops,
        "step_mib": memory.peak / 2**20,
        "resident_mib": resident / 2**10,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }  # fmt: skip


class Products(TorchDispatchMode):
    """Counts the floating-point operations of matrix products and attention. torch's own counter also hooks modules,
    which fails with torch.autograd.grad inside a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


def product_rate(rows: int, config: Any) -> float:
    """Operations per CPU second of a step's most frequent product: the first of the base's MLP."""
    a, b = torch.randn(rows, config.hidden_size), torch.randn(config.hidden_size, config.intermediate_size)
    seconds = []
    for _ in range(20):
        begun = time.process_time()
        a @ b
        seconds.append(time.process_time() - begun)
    return 2 * a.numel() * b.shape[1] / statistics.median(seconds)


def answer(found: dict[str, Any], path: Path) -> None:
    """Write the answer atomically to a file, since the programs may print anything to standard output."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(path)


def live_memory(job: Job) -> Any:
    """live_memory.LiveMemory, loaded by path: it needs only torch, and not every side has specheads."""
    spec = importlib.util.spec_from_file_location("memory", job["memory"])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LiveMemory


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    figures = run(job)
    (Path(job["out"]) / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
