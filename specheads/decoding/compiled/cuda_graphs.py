"""A compiled step as a CUDA graph: one call from the host launches all of its kernels.

A pass over a model is hundreds of kernels. Launched one by one, they wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import get_static_address_type
from torch._inductor.compile_fx import compile_fx
from transformers.utils import logging

logger = logging.get_logger(__name__)

MAX_CAPTURES = 4  # kept per step, the most recently used: a cache at another address needs a capture of its own
NOT_CAPTURED = ("cpu",)  # copies from the host cannot be captured

TensorFunction = Callable[..., Sequence[Any]]


def cuda_graphs(pool: Any) -> Callable[..., CudaGraph]:
    """A torch.compile backend: inductor's code, run as CUDA graphs with memory from this pool."""

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> CudaGraph:
        compiled: Any = compile_fx(graph, inputs)
        return CudaGraph(compiled, pool)

    return backend


class CudaGraph:
    """A function of tensors, captured at its second call: the first compiles kernels, which a capture cannot do.

    Parameters, and tensors with a fixed address (`torch._dynamo.mark_static_address`: caches, which the function
    writes), are read in place; if their addresses change, the function is captured again. The other inputs are copied
    into the graph's buffers, and its outputs are cloned, since the next replay overwrites them.
    """

    def __init__(self, function: TensorFunction, pool: Any) -> None:
        """pool: the memory that all graphs of one base share, of `torch.cuda.graph_pool_handle`."""
        self.function, self.pool = function, pool
        self.is_warm = self.has_failed = False
        self.fixed: list[int] = []  # indices of the inputs that are read in place
        self.captures: dict[tuple[int, ...], Capture] = {}  # by the addresses of those inputs

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if not self.is_warm:
            self.is_warm = True
            self.fixed = [i for i, value in enumerate(inputs) if has_fixed_address(value)]
            self.has_failed = any(isinstance(value, Tensor) and value.device.type in NOT_CAPTURED for value in inputs)
        elif not self.has_failed:
            addresses = tuple(inputs[i].data_ptr() for i in self.fixed)
            capture = self.captures.pop(addresses, None) or self.capture(inputs)
            if capture is not None:
                self.captures[addresses] = capture  # moved to the end: the most recently used
                return capture.replay(inputs)
        return self.function(*inputs)

    def capture(self, inputs: Sequence[Any]) -> Capture | None:
        """A capture with these inputs; None, after one warning, if CUDA refuses."""
        while len(self.captures) >= MAX_CAPTURES:
            del self.captures[next(iter(self.captures))]
        try:
            return Capture(self.function, inputs, self.fixed, self.pool)
        except RuntimeError as error:
            self.has_failed = True
            logger.warning("a compiled step runs without a CUDA graph: %s", str(error).strip().split("\n")[0])
            return None


class Capture:
    """One captured call. fixed: the indices of the inputs that are read in place."""

    def __init__(self, function: TensorFunction, inputs: Sequence[Any], fixed: Sequence[int], pool: Any) -> None:
        self.copied = [i for i, value in enumerate(inputs) if isinstance(value, Tensor) and i not in {*fixed}]
        captured = list(inputs)
        for i in self.copied:
            captured[i] = torch.empty_strided(
                inputs[i].shape, inputs[i].stride(), dtype=inputs[i].dtype, device=inputs[i].device
            )
        self.parts = [unrepeated(captured[i]) for i in self.copied]
        self.buffers = [captured[i][part] for i, part in zip(self.copied, self.parts, strict=True)]
        self.copy_inputs(inputs)
        self.run, self.outputs = capture_graph(function, captured, pool)
        caches = {inputs[i].untyped_storage().data_ptr() for i in fixed}
        self.is_overwritten = [
            isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in caches for value in self.outputs
        ]

    def copy_inputs(self, inputs: Sequence[Any]) -> None:
        """Copy the inputs into the graph's buffers."""
        if self.buffers:
            new = [inputs[i][part] for i, part in zip(self.copied, self.parts, strict=True)]
            torch._foreach_copy_(self.buffers, new)

    def replay(self, inputs: Sequence[Any]) -> Sequence[Any]:
        self.copy_inputs(inputs)
        self.run()
        pairs = zip(self.outputs, self.is_overwritten, strict=True)
        return [value.clone() if overwritten else value for value, overwritten in pairs]


def has_fixed_address(value: Any) -> bool:
    return isinstance(value, nn.Parameter) or get_static_address_type(value) is not None


def unrepeated(value: Tensor) -> Any:
    """An index that keeps one of the elements that `expand` repeats, so that no address is indexed twice."""
    return tuple(slice(1) if step == 0 else slice(None) for step in value.stride()) if 0 in value.stride() else ...


def capture_graph(
    function: TensorFunction, inputs: Sequence[Any], pool: Any
) -> tuple[Callable[[], None], Sequence[Any]]:
    """A function that replays the kernels on the inputs' memory, and the outputs that it overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = function(*inputs)
    return graph.replay, outputs
