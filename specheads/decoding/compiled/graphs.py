"""Graphs compiled by torch, one for each set of shapes and constants, kept as long as the base model.

torch's own guards, which would cost a tenth of a step, are left out. Instead each graph is stored under a key of all
that it depends on (`keys.py`).
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, TypeGuard, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.verifier import Verifier
from specheads.options import refuse_unknown

T = TypeVar("T")
logger = logging.get_logger(__name__)

DEFAULT_BACKEND = "inductor"


class CompiledSteps:
    """The compiled steps of one base model on one device.

    backend: of torch.compile. failure: why nothing is compiled, None if all is well. failures: for each graph that
    could not be compiled, why.
    """

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self.failure: str | None = None
        self._known: dict[Hashable, Callable[..., Any]] = {}
        self.failures: dict[Hashable, str] = {}
        self._logged: set[str] = set()
        self._compiling = RLock()
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # CUDA graphs share it

    def __len__(self) -> int:
        """How many graphs there are."""
        return len(self._known)

    def serves(self, target: Verifier) -> TypeGuard[Target]:
        """Are steps over this target, after its prefill, compiled? If not, the log says why, once."""
        reason = self.failure or reason_not_compiled(target)
        if reason is not None and reason not in self._logged:
            self._logged.add(reason)
            logger.warning("%s decodes without compiling: %s", target.name, reason)
        return reason is None

    def run(self, function: Callable[..., T], key: Hashable, *inputs: Any, module: nn.Module | None = None) -> T:
        """function(*inputs), compiled; if it cannot be compiled, run eagerly after one warning. If the first attempt to
        compile fails, no other is made. module: the graph is dropped when this head is freed."""
        if self.failure is not None or (function, key) in self.failures:
            return function(*inputs)
        if (compiled := self._known.get((function, key))) is not None:
            return compiled(*inputs)
        with self._compiling:  # threads that need the same graph wait for the first of them
            if self.failure is not None or (function, key) in {*self._known, *self.failures}:
                return self.run(function, key, *inputs)
            return self._compile(function, key, *inputs, module=module)

    def _compile(self, function: Callable[..., T], key: Hashable, *inputs: Any, module: nn.Module | None) -> T:
        """As `run`, for what has not been compiled yet."""
        began = time.perf_counter()
        logger.warning("compiling %s for new shapes; torch keeps the code on disk", function.__name__)
        try:
            compiled = compile_without_guards(function, self.backend, self.device, self.pool)
            result = compiled(*inputs)
        except Exception as error:
            result = function(*inputs)  # if the inputs were at fault, this raises the error
            reason = f"{type(error).__name__}: {first_lines(error)}"
            self.failures[function, key] = reason
            if not self._known:
                self.failure = reason
                self._logged.add(reason)
            logger.warning("%s cannot be compiled, and decoding continues without: %s", function.__name__, reason)
            return result
        logger.warning("compiled %s in %.0f s", function.__name__, time.perf_counter() - began)
        self._known[function, key] = compiled
        if module is not None:  # not needed for the base: its compiled steps are freed with it
            finalize(module, forget, ref(self), (function, key)).atexit = False
        return result


def forget(steps: ref[CompiledSteps], graph: Hashable) -> None:
    """Drop the graph of a head that has been freed. The steps may be gone already: they are freed with the base."""
    if (found := steps()) is not None:
        found._known.pop(graph, None)


_STEPS: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, torch.device], CompiledSteps]] = WeakKeyDictionary()


def compiled_steps(base: PreTrainedModel, backend: str | bool = True) -> CompiledSteps:
    """The compiled steps of this base on its current device, which live as long as it does. backend: True for inductor.

    ValueError, with the nearest name, for a backend that torch does not have.
    """
    name = DEFAULT_BACKEND if backend is True else str(backend)
    refuse_unknown([name], torch._dynamo.list_backends(exclude_tags=()), "backend of torch.compile")
    return _STEPS.setdefault(base, {}).setdefault((name, base.device), CompiledSteps(name, base.device))


def compile_without_guards(
    function: Callable[..., T], backend: str, device: torch.device, pool: Any = None
) -> Callable[..., T]:
    """torch.compile of a copy of the function, as torch caches by code object. On CUDA inductor's code runs as CUDA
    graphs, with memory from this pool."""
    code = function.__code__.replace(co_name=f"{function.__name__}_")
    fresh = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    if backend == DEFAULT_BACKEND and device.type == "cpu":
        # A step is some 200 short calls, each slower from Python than from C++. Building the wrapper separately, with
        # less optimisation, takes 0.55 to 0.66 of the time to compile, and 1 to 2 % more to run (docs/LOG.md).
        options |= {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
        # The wrapper of a 24-layer base is 7,300 lines in one function: 35 CPU s with -O1 and 14 with -O0, and no
        # difference between their steps was seen (docs/LOG.md).
        options["aot_inductor.compile_wrapper_opt_level"] = "O0"
    chosen: Any = backend
    if backend == DEFAULT_BACKEND and device.type == "cuda":
        from specheads.decoding.compiled.cuda_graphs import cuda_graphs  # it imports torch's compiler

        chosen = cuda_graphs(pool)
    return torch.compile(fresh, fullgraph=True, dynamic=False, backend=chosen, options=options)


def first_lines(error: Exception, count: int = 2) -> str:
    """The first non-empty lines of its message: torch names the backend first, and then what went wrong."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return " ".join(lines[:count]) or "no message"


def reason_not_compiled(target: Verifier) -> str | None:
    """Why steps over this target, after its prefill, are not compiled; None if they are."""
    if target.is_encoder_decoder:
        return "the passes of an encoder-decoder have many shapes"
    if not isinstance(target, Target) or not target.static:
        return "it was not made with static=True"
    if target.switch is not None:
        return "its positions change with the length of the text"
    if target.inputs.token_types is not None:
        return "it takes token types"
    devices = {str(device) for device in (getattr(target.base, "hf_device_map", None) or {}).values()}
    return f"its layers are on several devices ({', '.join(sorted(devices))})" if len(devices) > 1 else None
