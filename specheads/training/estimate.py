"""What a training run will need, from its configs alone: parameters, memory per process, time, disk for features.

Nothing is loaded: base and head are built without weights. Memory is what persists (weights, gradients, the moments of
AdamW or Muon), a rough peak of activations, and what a process takes without a model: on a CPU its libraries, as
measured in this process; on a GPU a context. Time is the number of operations over a share of the device's peak speed.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import psutil  # accelerate's own dependency
import torch
from torch import nn

from specheads.decoding.verify.hf_base import layer_count, text_config
from specheads.decoding.verify.taps import decoder_layers
from specheads.heads import DraftHead
from specheads.hub import hub_options
from specheads.losses.chunked import rows_of_chunk
from specheads.models import saved_head
from specheads.models.base.loading import auto_class, load_config
from specheads.models.base.state_size import state_size
from specheads.models.convert import convert
from specheads.models.spec_model import SpecModel
from specheads.options import OptionError
from specheads.training.distributed.launch import KINDS, SHARDED
from specheads.training.recipe.recipe import Recipe
from specheads.training.trainer.optim import is_hidden_matrix

GIB = 1 << 30
GPU_CONTEXT = 0.5 * GIB  # of CUDA, its kernels and workspaces; not measured
UTILISATION = 0.4  # share of a GPU's dense bf16 peak that frozen forward passes and a small head reach
PEAKS = {  # dense bf16 operations a second, from the vendor's data sheets
    "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12, "MI300X": 1307e12,
}  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """Parameter counts; memory: GiB per process, by part; disk_gb, seconds: for a million tokens on one process;
    loading: GiB of host memory that each process fills before the model is sharded or moved; sharded_loading: GiB per
    machine if only one process loaded and sent the others their shards, which is not implemented; recurrent_states: the
    memory of a hybrid base's states during generation (training needs none)."""

    base_parameters: int
    trained_parameters: int
    memory: dict[str, float]
    disk_gb: dict[str, float]
    device: str
    seconds: float
    processes: int
    distributed: str
    loading: float
    sharded_loading: float | None = None
    recurrent_states: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "memory_total": sum(self.memory.values())}

    def lines(self) -> list[str]:
        """The estimate as text, for people."""
        parts = ", ".join(f"{name} {size:.2f}" for name, size in self.memory.items())
        disk = ", ".join(f"{size:.1f} GB as {name}" for name, size in self.disk_gb.items())
        plan, together = [], min(self.processes, 8)
        if self.sharded_loading is not None:
            plan = [
                "the same if one process of the machine alone loaded and sent the others their shards (by formula, not "
                f"built): {self.sharded_loading:.2f} GiB a machine"
            ]
        states = [f"recurrent states while generating: {self.recurrent_states}"] if self.recurrent_states else []
        return [
            f"base: {self.base_parameters:,} parameters, frozen; trained: {self.trained_parameters:,}",
            f"memory of each of {self.processes} processes ({self.distributed}): {sum(self.memory.values()):.2f} GiB "
            f"({parts})",
            f"memory of the machine while the base is loaded, whole in each process: {self.loading:.2f} GiB a process, "
            f"{self.loading * together:.2f} GiB for {together} on one machine",
            *plan,
            f"features on disk, a million tokens: {disk}",
            f"time, a million tokens: {self.seconds / self.processes:,.0f} s on {self.processes} × {self.device}",
            *states,
        ]


def estimate(
    recipe: Recipe, processes: int | None = None, distributed: str | None = None, device: str | None = None
) -> Estimate:
    """processes, distributed: as in launch.LaunchConfig; None: the recipe's, else one process, and "ddp" for several.
    device: one of PEAKS, or None for this machine's."""
    if processes is not None and processes < 1:
        raise OptionError("{processes}: expected at least 1", processes=processes)
    processes = processes or recipe.launch.processes or 1
    distributed = distributed or recipe.launch.distributed or ("ddp" if processes > 1 else "no")
    if recipe.features or not recipe.base or recipe.data is None:
        raise ValueError("a run over saved features cannot be estimated: give the base and the data of those features")
    config, model = _build_without_weights(recipe)
    sizes = _Sizes.of_model(model, recipe, getattr(config, "dtype", None))
    base = _base_bytes(model.base, recipe.bits, sizes.base_bytes)
    memory = _memory(sizes, base, processes, distributed)
    if recipe.training.get("bf16") or recipe.training.get("fp16"):
        memory["autocast"] = _autocast(model, sizes)
    if distributed == "ddp" and processes > 1:
        memory["buckets"] = sizes.trained * sizes.head_bytes  # DDP's flat copies of the gradients, which it all-reduces
    on_cpu = device is None and not torch.cuda.is_available()
    memory["runtime"] = psutil.Process().memory_info().rss if on_cpu else GPU_CONTEXT
    if distributed in SHARDED:
        memory["gathered"] = _gathered(model, sizes.base_bytes, sizes.trained * sizes.head_bytes, distributed)
    name, speed = _device(device)
    # The last layer's state, which the teacher's probabilities come from, is saved once even if it is also tapped.
    width = (sizes.taps + (layer_count(text_config(model.base)) not in model.head.layers)) * sizes.hidden
    states = state_size(config, None if recipe.base_dtype == "auto" else recipe.base_dtype)
    return Estimate(
        base_parameters=sizes.frozen,
        trained_parameters=sizes.trained,
        memory={part: size / GIB for part, size in memory.items()},
        disk_gb={"bfloat16": width * 2 / 1e3, "float8": width / 1e3},
        device=name,
        seconds=_operations_per_token(sizes) * 1e6 / speed,
        processes=processes,
        distributed=distributed,
        loading=base / GIB,
        sharded_loading=_sharded_loading(model, base, sizes) / GIB if distributed in SHARDED else None,
        recurrent_states=None if states is None else states.line(),
    )


def _build_without_weights(recipe: Recipe) -> tuple[Any, SpecModel]:
    config = load_config(recipe.base, **hub_options(recipe.base))
    options, joint = recipe.head, recipe.lora
    if recipe.init_from is not None:
        options, joint = saved_head.read_configs(recipe.init_from, config)
    assert options is not None
    with torch.device("meta"):
        base = auto_class(config).from_config(config)
        return config, convert(base, options, init=False, lora=joint)


@dataclass(frozen=True)
class _Sizes:
    """What the arithmetic needs to know about a run. frozen, trained, output: parameter counts, `output` of the head's
    own output matrices; base_bytes, head_bytes: per weight; tokens: per process and step."""

    frozen: int
    trained: int
    output: int
    base_bytes: int
    head_bytes: int
    tokens: int
    length: int
    hidden: int
    inner: int
    vocab: int
    layers: int
    taps: int
    passes: float  # of the head, per token
    matrices: int  # trained parameters for which Muon keeps only one moment
    recomputed: bool  # are the head's activations recomputed in the backward pass?
    head: DraftHead
    joint: bool  # are adapters on the base trained too?

    @classmethod
    def of_model(cls, model: SpecModel, recipe: Recipe, saved_dtype: Any) -> _Sizes:
        assert recipe.data is not None
        head, text = model.head, text_config(model.base)
        length = recipe.data.max_length
        return cls(
            frozen=sum(p.numel() for p in model.base.parameters() if not p.requires_grad),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            output=_output(head),
            base_bytes=_bytes(recipe.base_dtype, saved_dtype),
            head_bytes=_bytes(recipe.head_dtype, saved_dtype),
            tokens=recipe.training.get("per_device_train_batch_size", 8) * length,
            length=length,
            hidden=text.hidden_size,
            inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            vocab=text.vocab_size,
            layers=text.num_hidden_layers,
            taps=len(head.layers),
            passes=head.passes(length),
            matrices=sum(
                p.numel() for name, p in model.named_parameters() if p.requires_grad and is_hidden_matrix(name, p)
            )
            if recipe.training.get("muon")
            else 0,
            recomputed=any(recipe.training.get(f"{kind}_checkpointing") for kind in ("activation", "gradient")),
            head=head,
            joint=model.joint is not None,
        )

    @property
    def logits(self) -> int:
        """How many logits a token has, of the target and of one draft together."""
        return self.vocab + (self.head.config.output_size or self.vocab)


def _memory(sizes: _Sizes, base: float, processes: int, distributed: str) -> dict[str, float]:
    """Bytes per process by part, except what is gathered. base: bytes of the whole frozen base."""
    parts = KINDS[distributed]
    share, gradients_share, optimizer_share = (
        processes if part in parts else 1 for part in ("weights", "gradients", "optimizer")
    )
    hidden, inner, taps = sizes.hidden, sizes.inner, sizes.taps
    # One frozen layer at a time, the tapped states, and what the head keeps for its backward pass: about 14 vectors of
    # the hidden size and 3 of the inner size each time a token goes through it.
    activations: float = sizes.tokens * sizes.base_bytes * (4 * hidden + 2 * inner + (taps + 1) * hidden)
    whole = min(1.0, sizes.passes) if sizes.recomputed else sizes.passes
    activations += sizes.tokens * whole * sizes.base_bytes * (14 * hidden + 3 * inner)
    if sizes.recomputed:  # the inputs of each pass are kept
        activations += sizes.tokens * sizes.passes * sizes.base_bytes * 2 * hidden
    activations += _unrolled_attention(sizes)
    if sizes.joint:  # gradients flow through the base, so every layer keeps its activations
        activations += sizes.tokens * sizes.base_bytes * sizes.layers * (14 * hidden + 3 * inner)
    chunk = rows_of_chunk(sizes.logits, torch.device("cuda"))
    return {
        "base": base / share,
        "head": sizes.trained * sizes.head_bytes / share,
        "gradients": sizes.trained * sizes.head_bytes / gradients_share,
        "optimizer": (2 * sizes.trained - sizes.matrices) * 4 / optimizer_share,
        "activations": activations,
        # A chunk's logits (target and one draft) with the tensors of the loss, and output gradients in float32.
        "loss": 3 * 4 * min(chunk, sizes.tokens) * sizes.logits + 4 * sizes.output,
    }


def _operations_per_token(sizes: _Sizes) -> float:
    # `passes` is the share of tokens for heads with a matrix per depth, and the number of uses for a shared matrix.
    projected = sizes.passes * (sizes.output or sizes.vocab * sizes.hidden)
    trained = sizes.passes * (sizes.trained - sizes.output)
    if sizes.joint:
        return 6 * sizes.frozen + 8 * trained + 6 * projected
    return 2 * sizes.frozen + 6 * trained + 6 * projected


def _gathered(model: SpecModel, base_bytes: int, head: float, distributed: str) -> float:
    """Bytes of parameters that are temporarily gathered when everything is sharded. accelerate (1.15) puts a head into
    FSDP2's root, which stays gathered from forward to backward, as does the output matrix; layers are prefetched one
    ahead. ZeRO-3 gathers up to `stage3_max_live_parameters`, 10⁹ by default."""
    if distributed == "zero3":
        return min(sum(p.numel() for p in model.parameters()), 10**9) * base_bytes
    output = sum(p.numel() for p in model.get_output_embeddings().parameters())
    return head + (output + 2 * _largest_layer(model)) * base_bytes


def _autocast(model: SpecModel, sizes: _Sizes) -> float:
    """Bytes of autocast's 16-bit copies of float32 weights: of the trained ones, cached for a whole step, and of the
    largest frozen one, as those are not cached."""
    frozen = max((p.numel() for p in model.base.parameters() if not p.requires_grad), default=0)
    return 2 * (sizes.trained * (sizes.head_bytes == 4) + frozen * (sizes.base_bytes == 4))


def _sharded_loading(model: SpecModel, base: float, sizes: _Sizes) -> float:
    """Host memory in bytes of a machine whose first process reads the files, initialises the head and sends each layer
    to the process that keeps it: the base once, the head twice (with its gathered copy), and one layer in transit."""
    return base + 2 * sizes.trained * sizes.head_bytes + _largest_layer(model) * sizes.base_bytes


def _largest_layer(model: SpecModel) -> int:
    """Parameters of the base's largest decoder layer; 0 if its layers are not known."""
    layers = decoder_layers(model.base) or ()
    return max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)


def _unrolled_attention(sizes: _Sizes) -> float:
    """Bytes of the attention weights that training-time-test steps after the first keep, in float32 and bfloat16: of
    all those steps, or of the one being recomputed."""
    config: Any = sizes.head.config
    starts = sizes.head.unrolled_starts(sizes.length)
    if sizes.recomputed and starts:
        starts = min(starts, config.anchors or sizes.length, sizes.length)
    return starts * 6 * config.num_attention_heads * sizes.tokens if starts else 0


def _output(head: nn.Module) -> int:
    """Parameters of the head's own output matrices."""
    return sum(p.numel() for name, p in head.named_parameters() if "lm_head" in name)


def _bytes(name: str, saved: Any) -> int:
    dtype = saved if name == "auto" else getattr(torch, name)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
    return torch.empty((), dtype=dtype).element_size()


def _base_bytes(base: Any, bits: int | None, each: float) -> float:
    """Bytes of the frozen weights: quantised matrices, with a scale per 64 weights at 4 bits, and all others."""
    frozen = sum(p.numel() for p in base.parameters() if not p.requires_grad)
    layers = decoder_layers(base)
    if bits is None or layers is None:
        return frozen * each
    quantised = sum(p.numel() for p in layers.parameters() if p.ndim == 2 and not p.requires_grad)
    return (frozen - quantised) * each + quantised * (bits / 8 + (1 / 64 if bits == 4 else 0))


def _device(wanted: str | None) -> tuple[str, float]:
    """A device's name, and the operations a second to expect of it."""
    if wanted is None and torch.cuda.is_available():
        wanted = torch.cuda.get_device_name()
    if wanted is not None:
        # An L40 is no L4, and an A1000 no A100.
        known = next((name for name in PEAKS if re.search(rf"{name}(?!\d)", wanted, re.IGNORECASE)), None)
        if known is None:
            raise ValueError(f"device {wanted!r} is not known; give one of {', '.join(PEAKS)}")
        return known, UTILISATION * PEAKS[known]
    x = torch.randn(512, 512)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 0.2:
        x @ x
        count += 1
    return f"this CPU ({torch.get_num_threads()} threads)", count * 2 * 512**3 / (time.perf_counter() - began)
