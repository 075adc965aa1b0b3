"""What a training run will need: parameters, memory of each process, and time on this machine.

No weights are loaded: base and head are built without them, rows are read and counted. Memory is what persists
(weights, gradients, the moments of AdamW or Muon), a rough peak of activations, and what a process takes without a
model. Time is the number of operations over a share of the rate of matrix products, measured here.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil  # accelerate's own dependency
import torch

from specheads.decoding.verify.hf_base import text_config
from specheads.decoding.verify.taps import decoder_layers
from specheads.heads import DraftHead
from specheads.heads.layers.row_attention import queries_of_part
from specheads.hub import hub_options
from specheads.losses.chunked import rows_of_chunk
from specheads.models import saved_head
from specheads.models.base.loading import auto_class, load_config
from specheads.models.convert import convert
from specheads.models.spec_model import SpecModel
from specheads.options import OptionError, reason
from specheads.terminal import clock_time
from specheads.training.build import Budget, gate_seconds
from specheads.training.distributed.launch import FROM_FIRST, KINDS, SHARDED
from specheads.training.recipe.loading import load_rows
from specheads.training.recipe.recipe import Recipe
from specheads.training.trainer.optim import is_hidden_matrix

GIB = 1 << 30
GPU_CONTEXT = 0.5 * GIB  # of CUDA, its kernels and workspaces; not measured
PRODUCT_SHARE = 0.7  # of the rate of large products, which frozen passes and a small head reach
MEASURED_SECONDS = 0.3
BUSY = 0.25  # cores that other programs take, from which on a machine is called busy


@dataclass(frozen=True)
class Estimate:
    """Parameter counts; memory: GiB per process, by part; loading: GiB of host memory that a process which loads the
    base fills before the model is sharded or moved: each, or under FROM_FIRST the first; tokens_per_second: of all
    processes; budget, seconds: of the run by part, None if its rows cannot be read; unread: why; busy: cores that other
    programs take."""

    base_parameters: int
    trained_parameters: int
    memory: dict[str, float]
    loading: float
    processes: int
    distributed: str
    device: str
    tokens_per_second: float
    budget: Budget | None
    seconds: dict[str, float] | None
    unread: str
    busy: float

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory_total": sum(self.memory.values())}

    def lines(self) -> list[str]:
        """The estimate as text, for people."""
        parts = ", ".join(f"{name} {size:.2f}" for name, size in self.memory.items())
        together = min(self.processes, 8)
        loading = f"memory of the machine while the base is loaded, whole in each process: {self.loading:.2f} GiB a "
        loading += f"process, {self.loading * together:.2f} GiB for {together} on one machine"
        if self.distributed in FROM_FIRST:
            loading = f"memory of the machine while the first process loads the base for all: {self.loading:.2f} GiB"
        return [
            f"base: {self.base_parameters:,} parameters, frozen; trained: {self.trained_parameters:,}",
            f"memory of each of {self.processes} processes ({self.distributed}): {sum(self.memory.values()):.2f} GiB "
            f"({parts})",
            loading,
            *self._time(),
        ]

    def _time(self) -> list[str]:
        speed = f"{self.tokens_per_second:,.0f} tokens/s on {self.processes} × {self.device}"
        if self.budget is None or self.seconds is None:
            return [f"rows: not counted ({self.unread})", f"time: {speed}"]
        budget, whole = self.budget, sum(self.seconds.values())
        parts = ", ".join(f"{name} {clock_time(part)}" for name, part in self.seconds.items())
        lines = [
            f"rows: {budget.rows:,} to train on, in {budget.steps:,} steps of {budget.batch}; {budget.held_out:,} held "
            f"out, of which {budget.evaluated:,} are evaluated, {budget.evaluations} times",
            f"time: {whole / 60:,.1f} minutes ({parts}); {speed}",
        ]
        if self.busy > BUSY:
            lines.append(
                f"this machine is busy: other programs take {self.busy:.1f} of its {psutil.cpu_count()} cores; the "
                "time is that of an idle one"
            )
        return lines


def estimate(recipe: Recipe, processes: int | None = None, distributed: str | None = None) -> Estimate:
    """processes, distributed: as in LaunchConfig; None: the recipe's, else one process, and "ddp" for several."""
    if processes is not None and processes < 1:
        raise OptionError("{processes}: expected at least 1", processes=processes)
    processes = processes or recipe.launch.processes or 1
    distributed = distributed or recipe.launch.distributed or ("ddp" if processes > 1 else "no")
    if recipe.features or not recipe.base or recipe.data is None:
        raise ValueError("a run over saved features cannot be estimated: give the base and the data of those features")
    config, model = _build_without_weights(recipe)
    busy = psutil.cpu_percent(MEASURED_SECONDS) / 100 * psutil.cpu_count()
    sizes = _Sizes(model, recipe, getattr(config, "dtype", None))
    base = _base_bytes(model.base, recipe.quantize, sizes.base_bytes)
    memory = _memory(sizes, base, processes, distributed)
    device, rate, bandwidth = _measure(sizes)
    rate *= PRODUCT_SHARE
    budget, seconds, unread = None, None, ""
    try:
        train, held_out = load_rows(recipe)[:2]
    except OSError as error:
        unread = reason(error)
    else:
        share = recipe.evaluation_share
        budget = Budget.of(recipe.training, len(train), len(held_out or ()), share, processes)
        trained = budget.steps * budget.batch / len(train) * _padded_tokens(train, recipe) / processes
        seconds = {"training": trained * sizes.train_operations / rate}
        if held_out is not None:
            shown = budget.evaluations * budget.evaluated / len(held_out) * _padded_tokens(held_out, recipe) / processes
            seconds["evaluation"] = shown * sizes.evaluation_operations / rate
        if gate := recipe.parity.prompts * (distributed not in SHARDED):
            passes = 2 * gate * recipe.parity.max_new_tokens * base / bandwidth
            seconds["parity gate"] = min(passes, gate_seconds(share, seconds["training"]))
    return Estimate(
        base_parameters=sizes.frozen, trained_parameters=sizes.trained,
        memory={part: size / GIB for part, size in memory.items()}, loading=base / GIB,
        processes=processes, distributed=distributed, device=device,
        tokens_per_second=processes * rate / sizes.train_operations,
        budget=budget, seconds=seconds, unread=unread, busy=busy,
    )  # fmt: skip


def _build_without_weights(recipe: Recipe) -> tuple[Any, SpecModel]:
    config = load_config(recipe.base, **hub_options(recipe.base))
    options, joint = recipe.head, recipe.lora
    if recipe.init_from is not None:
        options, joint = saved_head.read_configs(recipe.init_from, config)
    assert options is not None
    with torch.device("meta"):
        base = auto_class(config).from_config(config)
        return config, convert(base, options, init=False, lora=joint)


class _Sizes:
    """What the arithmetic needs to know about a run: parameter counts, bytes of a weight, operations of a token."""

    def __init__(self, model: SpecModel, recipe: Recipe, saved_dtype: Any) -> None:
        assert recipe.data is not None
        self.model, self.head, training = model, model.head, recipe.training
        text, self.length = text_config(model.base), recipe.data.max_length
        self.frozen = sum(p.numel() for p in model.base.parameters() if not p.requires_grad)
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.base_bytes, self.head_bytes = (_bytes(d, saved_dtype) for d in (recipe.base_dtype, recipe.head_dtype))
        self.tokens = training.get("per_device_train_batch_size", 8) * self.length
        self.hidden, self.layers, self.taps = text.hidden_size, text.num_hidden_layers, len(self.head.layers)
        self.heads = getattr(text, "num_attention_heads", None) or 8
        self.inner = getattr(text, "intermediate_size", None) or 4 * self.hidden
        self.block = 14 * self.hidden + 3 * self.inner  # what a layer keeps of a token for its backward pass
        self.passes = self.head.passes(self.length)  # of the head, per token
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # Muon keeps one moment of these matrices.
        self.matrices = sum(p.numel() for name, p in named if training.get("muon") and is_hidden_matrix(name, p))
        self.recomputed = any(training.get(f"{kind}_checkpointing") for kind in ("activation", "gradient"))
        self.autocast = any(training.get(name) for name in ("bf16", "fp16"))
        self.output = _output(self.head)  # the head's own output matrices
        self.logits = text.vocab_size + (self.head.config.output_size or text.vocab_size)  # of target and one draft
        base_output: Any = model.get_output_embeddings()
        self.base_output = base_output.weight.numel()

    @property
    def train_operations(self) -> float:
        """Operations of a training token. `passes` is the share of tokens for heads with a matrix per depth, and the
        number of uses for a shared matrix."""
        projected = self.passes * (self.output or self.base_output)
        trained = self.passes * (self.trained - self.output)
        if self.model.joint is not None:
            return 6 * self.frozen + 8 * trained + 6 * projected
        return 2 * self._multiplied + 6 * trained + 6 * projected

    @property
    def evaluation_operations(self) -> float:
        """Operations of a token that is evaluated, where every start is scored."""
        depths = self.head.scored_depths if self.head.config.fixed_depth is None else 1
        return 2 * self._multiplied + 2 * depths * (self.trained - self.output + (self.output or self.base_output))

    @property
    def _multiplied(self) -> int:
        """The base's parameters that a token is multiplied with: all but the embeddings."""
        embeddings: Any = self.model.get_input_embeddings()
        tied = embeddings.weight is self.model.get_output_embeddings().weight
        return self.frozen - (0 if tied else embeddings.weight.numel())


def _memory(sizes: _Sizes, base: float, processes: int, distributed: str) -> dict[str, float]:
    """Bytes per process by part. base: of the whole frozen base."""
    parts = KINDS[distributed]
    share, gradients_share, optimizer_share = (
        processes if part in parts else 1 for part in ("weights", "gradients", "optimizer")
    )
    # One frozen layer at a time, the tapped states, and what the head keeps each time a token goes through it.
    kept = 4 * sizes.hidden + 2 * sizes.inner + (sizes.taps + 1) * sizes.hidden
    kept += (min(1.0, sizes.passes) if sizes.recomputed else sizes.passes) * sizes.block
    kept += sizes.recomputed * sizes.passes * 2 * sizes.hidden  # the inputs of each pass
    # With adapters, gradients flow through the base, so every layer keeps its activations.
    kept += (sizes.model.joint is not None) * sizes.layers * sizes.block
    head = sizes.trained * sizes.head_bytes
    chunk = min(rows_of_chunk(sizes.logits, torch.device("cuda")), sizes.tokens)
    memory = {
        "base": base / share, "head": head / share, "gradients": head / gradients_share,
        "optimizer": (2 * sizes.trained - sizes.matrices) * 4 / optimizer_share,
        "activations": sizes.tokens * sizes.base_bytes * kept + _attention_scores(sizes),
        # A chunk's logits with the tensors of the loss, and output gradients in float32.
        "loss": 3 * 4 * chunk * sizes.logits + 4 * sizes.output,
    }  # fmt: skip
    if sizes.autocast:
        # 16-bit copies of float32 weights: of the trained ones for a step, of the largest frozen one for a moment.
        frozen = max((p.numel() for p in sizes.model.base.parameters() if not p.requires_grad), default=0)
        memory["autocast"] = 2 * (sizes.trained * (sizes.head_bytes == 4) + frozen * (sizes.base_bytes == 4))
    if distributed == "ddp" and processes > 1:
        memory["buckets"] = head  # DDP's flat copies of the gradients, which it all-reduces
    memory["runtime"] = GPU_CONTEXT if torch.cuda.is_available() else psutil.Process().memory_info().rss
    if distributed == "zero3":  # gathers up to `stage3_max_live_parameters`
        memory["gathered"] = min(sum(p.numel() for p in sizes.model.parameters()), 10**9) * sizes.base_bytes
    elif distributed in SHARDED:
        # accelerate (1.15) puts a head into FSDP2's root, which stays gathered from forward to backward, as does the
        # output matrix; layers are prefetched one ahead.
        layers = decoder_layers(sizes.model.base) or ()
        largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
        memory["gathered"] = head + (sizes.base_output + 2 * largest) * sizes.base_bytes
    return memory


def _attention_scores(sizes: _Sizes) -> float:
    """Bytes of the attention scores of one part of the head's queries, their gradient and their weights, in float32."""
    if not sizes.head.attends:
        return 0
    heads = (getattr(sizes.head.config, "num_attention_heads", None) or sizes.heads) * sizes.tokens // sizes.length
    part = min(queries_of_part(heads, sizes.length, torch.device("cuda")), sizes.length)
    return 3 * 4 * heads * part * sizes.length


def _output(head: DraftHead) -> int:
    return sum(p.numel() for name, p in head.named_parameters() if "lm_head" in name)


def _bytes(name: str, saved: Any) -> int:
    dtype = saved if name == "auto" else getattr(torch, name)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
    return torch.empty((), dtype=dtype).element_size()


def _base_bytes(base: Any, quantize: str | None, each: float) -> float:
    """Bytes of the frozen weights: quantised matrices, with a scale per 64 weights at 4 bits, and all others."""
    frozen = sum(p.numel() for p in base.parameters() if not p.requires_grad)
    layers = decoder_layers(base)
    if quantize is None or layers is None:
        return frozen * each
    quantised = sum(p.numel() for p in layers.parameters() if p.ndim == 2 and not p.requires_grad)
    return (frozen - quantised) * each + quantised * (1 / 2 + 1 / 64 if quantize == "4bit" else 1)


def _padded_tokens(rows: Any, recipe: Recipe) -> int:
    """Tokens of a pass over the rows, with the padding of its batches."""
    lengths = [len(ids) for ids in rows["input_ids"]]
    size = recipe.training.get("per_device_train_batch_size", 8)
    if recipe.training.get("train_sampling_strategy") == "group_by_length":
        lengths.sort()
    else:
        random.Random(0).shuffle(lengths)
    batches = (lengths[start : start + size] for start in range(0, len(lengths), size))
    return sum(max(batch) * len(batch) for batch in batches)


def _measure(sizes: _Sizes) -> tuple[str, float, float]:
    """This machine's device; operations a second of large products, and bytes a second of products with one row, in the
    dtype of the run. On a CPU they are rates of its own time, so that other programs do not count."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if sizes.autocast or sizes.base_bytes == 2 else torch.float32
    weight = torch.randn((1 << 25) // sizes.hidden, sizes.hidden, device=device, dtype=dtype)  # larger than caches
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"this CPU ({threads} threads)"

    def runs_per_second(rows: int) -> float:
        x = torch.randn(rows, sizes.hidden, device=device, dtype=dtype)
        product = x @ weight.T
        if device.type == "cuda":
            torch.cuda.synchronize()
        clock = time.perf_counter if device.type == "cuda" else lambda: time.process_time() / threads
        began, count = clock(), 0
        while clock() - began < MEASURED_SECONDS:
            torch.mm(x, weight.T, out=product)
            count += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        return count / (clock() - began)

    return (
        f"{name}, products in {str(dtype).removeprefix('torch.')}",
        2 * 256 * weight.numel() * runs_per_second(256),
        weight.numel() * weight.element_size() * runs_per_second(1),
    )
