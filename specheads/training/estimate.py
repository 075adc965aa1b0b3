"""What a training run will take, reckoned from configs alone: parameters, memory of each GPU, time, disk for features.

Nothing is loaded: base and head are built without weights. Memory is what stays (weights, gradients, AdamW's moments)
plus a rough peak of activations; time is arithmetic over a share of what the device can do at best.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specheads.decoding.target.hf_base import text_config
from specheads.heads.block import decoder_layers
from specheads.hub import options as hub_options
from specheads.losses.chunked import rows_of_chunk
from specheads.models import saved_head
from specheads.models.convert import convert
from specheads.models.spec_model import SpecModel
from specheads.options import OptionError
from specheads.training.recipe import Recipe

GIB = 1 << 30
UTILISATION = 0.4  # of a GPU's dense bf16 peak, which frozen forward passes and a small head reach
PEAKS = {  # dense bf16 operations a second, from the vendor's data sheets
    "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12, "MI300X": 1307e12,
}  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """Counts of parameters; GiB of each process by part; GB of disk and seconds of one process a million tokens;
    loading: GiB of the machine's own memory that each process fills before it is cut up or moved."""

    base_parameters: int
    trained_parameters: int
    memory: dict[str, float]
    disk_gb: dict[str, float]
    device: str
    seconds: float
    processes: int
    distributed: str
    loading: float

    def record(self) -> dict[str, Any]:
        return {**vars(self), "memory_total": sum(self.memory.values())}

    def lines(self) -> list[str]:
        """For a person."""
        parts = ", ".join(f"{name} {size:.2f}" for name, size in self.memory.items())
        disk = ", ".join(f"{size:.1f} GB as {name}" for name, size in self.disk_gb.items())
        return [
            f"base: {self.base_parameters:,} parameters, frozen; trained: {self.trained_parameters:,}",
            f"memory of each of {self.processes} processes ({self.distributed}): {sum(self.memory.values()):.2f} GiB "
            f"({parts})",
            f"memory of the machine while the base is loaded, whole in each process: {self.loading:.2f} GiB a process",
            f"features on disk, a million tokens: {disk}",
            f"time, a million tokens: {self.seconds / self.processes:,.0f} s on {self.processes} × {self.device}",
        ]


def estimate(recipe: Recipe, processes: int = 1, distributed: str = "no", device: str | None = None) -> Estimate:
    """processes, distributed: as launch.LaunchConfig has them. device: one of PEAKS, or None for the one here."""
    if processes < 1:
        raise OptionError("{processes}: expected at least 1", processes=processes)
    if recipe.features or not recipe.base or recipe.data is None:
        raise ValueError("a run over saved features is not reckoned: give the base and the data they were saved from")
    config = AutoConfig.from_pretrained(recipe.base, **hub_options(recipe.base))
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
        options = recipe.head if recipe.init_from is None else saved_head.read(recipe.init_from).head
        assert options is not None
        joint = recipe.lora if recipe.init_from is None else saved_head.read(recipe.init_from).config.joint
        model = convert(base, options, init=False, lora=joint)
    head, arguments = model.head, recipe.training
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.base.parameters() if not p.requires_grad)
    base_bytes = _bytes(recipe.base_dtype, getattr(config, "dtype", None))
    head_bytes = _bytes(recipe.head_dtype, getattr(config, "dtype", None))
    whole = distributed in ("no", "ddp", "zero1", "zero2")
    share = 1 if whole else processes
    length = recipe.data.max_length
    tokens = arguments.get("per_device_train_batch_size", 8) * length
    sizes = text_config(model.base)
    hidden, vocab = sizes.hidden_size, sizes.vocab_size
    inner = getattr(sizes, "intermediate_size", None) or 4 * hidden
    taps = len(head.layers)
    passes, own = head.passes(length), _output(head)
    # Of a matrix a depth `passes` is the share of tokens, of one that all depths share how often it is applied.
    projected = passes * (own or vocab * hidden)
    logits = vocab + (head.config.output_size or vocab)
    chunk = rows_of_chunk(logits, torch.device("cuda"))
    memory = {
        "base": _base_bytes(model.base, recipe.bits, base_bytes) / share,
        "head": trained * head_bytes / share,
        "gradients": trained * head_bytes / (processes if distributed in ("zero2", "zero3", "fsdp", "fsdp2") else 1),
        "optimizer": 2 * trained * 4 / (1 if distributed in ("no", "ddp") else processes),
        # One frozen layer at a time, what is tapped, and what the head keeps for its backward pass: some 14 vectors of
        # the hidden size and 3 of the inner one for each time a token goes through it.
        "activations": tokens * base_bytes * (4 * hidden + 2 * inner + (taps + 1) * hidden)
        + tokens * passes * base_bytes * (14 * hidden + 3 * inner)
        + _unrolled_attention(head, tokens, length),
        # A chunk's logits of target and one draft with the tensors of the loss, and the weights' gradients in float32.
        "loss": 3 * 4 * min(chunk, tokens) * logits + 4 * own,
    }
    per_token = 2 * frozen + (6 if model.joint is None else 8) * passes * (trained - own) + 6 * projected
    if not whole:
        memory["gathered"] = _gathered(model, base_bytes, trained * head_bytes, distributed)
    if model.joint is not None:  # the gradient goes back through the base, which keeps what every layer needs for it
        per_token += 4 * frozen
        memory["activations"] += tokens * base_bytes * sizes.num_hidden_layers * (14 * hidden + 3 * inner)
    name, speed = _device(device)
    width = (taps + 1) * hidden
    return Estimate(
        frozen, trained, {part: size / GIB for part, size in memory.items()},
        {"bfloat16": width * 2 / 1e3, "float8": width / 1e3}, name, per_token * 1e6 / speed, processes, distributed,
        _base_bytes(model.base, recipe.bits, base_bytes) / GIB,
    )  # fmt: skip


def _gathered(model: SpecModel, base_bytes: int, head: float, distributed: str) -> float:
    """Bytes of what is whole for a while where everything is cut up. accelerate (1.15) puts a head into FSDP2's root,
    which stays whole from forward to backward as the output matrix does, and layers come one ahead; of ZeRO-3's as many
    parameters as its `stage3_max_live_parameters`, 10⁹ by default."""
    if distributed == "zero3":
        return min(sum(p.numel() for p in model.parameters()), 10**9) * base_bytes
    layers = decoder_layers(model.base) or ()
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
    output = sum(p.numel() for p in model.get_output_embeddings().parameters())
    return head + (output + 2 * largest) * base_bytes


def _unrolled_attention(head: Any, tokens: int, length: int) -> float:
    """Bytes of the attention weights that later steps of a training-time test keep, in float32 and bfloat16."""
    starts = head.unrolled_starts(length)
    return starts * 6 * head.config.num_attention_heads * tokens if starts else 0


def _output(head: nn.Module) -> int:
    """Parameters of the head's own output matrices."""
    return sum(p.numel() for name, p in head.named_parameters() if "lm_head" in name)


def _bytes(name: str, saved: Any) -> int:
    dtype = saved if name == "auto" else getattr(torch, name)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
    return torch.empty((), dtype=dtype).element_size()


def _base_bytes(base: Any, bits: int | None, each: float) -> float:
    """Of the frozen weights: matrices of quantised layers, with a scale for 64 weights or a row, and all others."""
    frozen = sum(p.numel() for p in base.parameters() if not p.requires_grad)
    layers = decoder_layers(base)
    if bits is None or layers is None:
        return frozen * each
    quantised = sum(p.numel() for p in layers.parameters() if p.ndim == 2 and not p.requires_grad)
    return (frozen - quantised) * each + quantised * (bits / 8 + (1 / 64 if bits == 4 else 0))


def _device(wanted: str | None) -> tuple[str, float]:
    """A device's name, and what it does a second."""
    if wanted is None and torch.cuda.is_available():
        wanted = torch.cuda.get_device_name()
    if wanted is not None:
        known = next((name for name in PEAKS if name.lower() in wanted.lower()), None)
        if known is None:
            raise ValueError(f"device {wanted!r} is not known; give one of {', '.join(PEAKS)}")
        return known, UTILISATION * PEAKS[known]
    x = torch.randn(512, 512)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 0.2:
        x @ x
        count += 1
    return f"this CPU ({torch.get_num_threads()} threads)", count * 2 * 512**3 / (time.perf_counter() - began)
