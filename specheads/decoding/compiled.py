"""Steps of decode() compiled by torch: one graph for each set of shapes and constants, kept as long as the base model.

torch's own guards, which would cost a tenth of a step, are left out. In their place stands a key of all that a graph
depends on, and another key is another graph.
"""

from __future__ import annotations

import copy
import time
import types
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import logits_process as hf
from transformers.utils import logging

from specheads.decoding.acceptance import Acceptance
from specheads.decoding.drafters.base import Advance, Context, DeviceDraft, Drafter
from specheads.decoding.planner import BestFirstTree, DynamicTree, Plan, StaticTree
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.step import step_after_draft, verify, whole_step
from specheads.decoding.target.causal import Target, TargetOutput
from specheads.decoding.tree import DraftTree

T = TypeVar("T")
logger = logging.get_logger(__name__)

DEFAULT_BACKEND = "inductor"
# Logits processors that torch can trace, and those of their options that a graph reads anew.
TRACED = (
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper, hf.SuppressTokensLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization,
)  # fmt: skip
OPTIONS = ("temperature", "top_p", "min_p")


class CompiledSteps:
    """The compiled steps of one base model.

    backend: of torch.compile. `failure`: why nothing is compiled, None while all is well.
    """

    def __init__(self, backend: str = DEFAULT_BACKEND) -> None:
        self.backend = backend
        self.failure: str | None = None
        self._known: dict[Hashable, Callable[..., Any]] = {}
        self._failed: set[Hashable] = set()
        self._said: set[str] = set()

    def __len__(self) -> int:
        """How many graphs there are."""
        return len(self._known)

    def serves(self, target: Target) -> bool:
        """Are steps over this target, after its prefill, compiled? If not, the log says why, once."""
        reason = self.failure or reason_not_compiled(target)
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            logger.warning("%s decodes without compiling: %s", type(target.base).__name__, reason)
        return reason is None

    def run(self, function: Callable[..., T], key: Hashable, *inputs: Any) -> T:
        """function(*inputs), compiled; as it is, after one warning, if it cannot be compiled. Then no other is tried
        either if it was the first."""
        if self.failure is not None or (function, key) in self._failed:
            return function(*inputs)
        if (compiled := self._known.get((function, key))) is not None:
            return compiled(*inputs)
        began = time.perf_counter()
        logger.warning("compiling %s for new shapes; torch keeps the code on disk", function.__name__)
        compiled = compile_without_guards(function, self.backend)
        try:
            result = compiled(*inputs)
        except Exception as error:
            result = function(*inputs)  # which raises what is wrong with the inputs, if that is what it was
            reason = f"{type(error).__name__}: {first_lines(error)}"
            self._failed.add((function, key))
            if not self._known:
                self.failure = reason
                self._said.add(reason)
            logger.warning("%s cannot be compiled, and decoding continues without: %s", function.__name__, reason)
            return result
        logger.warning("compiled %s in %.0f s", function.__name__, time.perf_counter() - began)
        self._known[function, key] = compiled
        return result


_STEPS: WeakKeyDictionary[PreTrainedModel, dict[str, CompiledSteps]] = WeakKeyDictionary()


def compiled_steps(base: PreTrainedModel, backend: str | bool = True) -> CompiledSteps:
    """The compiled steps of this base, which live as long as it does. backend: True for torch's own."""
    backend = DEFAULT_BACKEND if backend is True else str(backend)
    return _STEPS.setdefault(base, {}).setdefault(backend, CompiledSteps(backend))


def compile_without_guards(function: Callable[..., T], backend: str) -> Callable[..., T]:
    """torch.compile of a copy of the function, whose code torch knows nothing of yet."""
    code = function.__code__.replace(co_name=f"{function.__name__}_")
    fresh = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(fresh, fullgraph=True, dynamic=False, backend=backend, options=options)


def first_lines(error: Exception, count: int = 2) -> str:
    """The first lines of its message that hold text: torch names the backend first, and then what went wrong."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return " ".join(lines[:count]) or "no message"


class StepCompiler:
    """Runs the steps of one call of decode() compiled: whole where the host has no part in them, else what can be.

    whole: the host has no part in drafting and judging, except that the first step reads the prompt. judges: nor in
    judging a tree of point masses.
    """

    def __init__(
        self, steps: CompiledSteps, target: Target, drafter: Drafter | None, plan: Plan | None, accept: Acceptance,
        sampler: Sampler, num_top: int, *, details: bool,
    ) -> None:  # fmt: skip
        """details: the caller wants scores or divergences, which leave a step only on the host's way."""
        self.steps, self.target, self.drafter, self.plan = steps, target, drafter, plan
        self.accept, self.sampler, self.num_top = accept, sampler, num_top
        traced = all(type(processor) in TRACED for processor in sampler.processors)
        self.judges = traced and accept.is_exact(sampler) and not details
        if self.judges:
            sampler.processors = [
                options_as_tensors(processor, target.cache.lengths.device) for processor in sampler.processors
            ]
        self.whole = self.judges and (drafter is None or (drafter.on_device and grows_on_device(plan)))
        self._state: Hashable = None
        self._modules: dict[nn.Module, Hashable] = {}

    @property
    def state(self) -> Hashable:
        """What graphs depend on until the next `renew`: read after a first step, which may enlarge a head's tables."""
        if self._state is None:
            offset, weight = self.target.offset, self.target.embed.weight
            autocast = torch.is_autocast_enabled(weight.device.type) and torch.get_autocast_dtype(weight.device.type)
            self._state = (
                module_state(self.target.base),
                self.target.layers,
                None if offset is None else offset.shape,
                torch.get_default_dtype(),
                autocast,
            )
        return self._state

    def state_of(self, module: nn.Module | None) -> Hashable:
        """What a graph with this module depends on, read and kept as `state` is."""
        if module is None:
            return None
        if module not in self._modules:
            self._modules[module] = module_state(module)
        return self._modules[module]

    def renew(self) -> None:
        """New prompts came into the batch."""
        self._state = None
        self._modules.clear()

    def key(self, *others: Any) -> Hashable:
        """That of a graph which depends on the target and on others."""
        cache = self.target.cache
        return self.state, len(cache.lengths), cache.scratch, cache.attended, cache.size, *others

    @property
    def judging(self) -> Hashable:
        """What judging depends on, beside the tree."""
        return self.num_top, self.sampler.do_sample, tuple(map(constants_of, self.sampler.processors))

    def whole_step(self, context: Context, numbers: Callable[[int], Tensor | None], active: Tensor) -> Advance | None:
        """The step in one graph; None if it has to begin on the host."""
        if not self.judges:
            return None
        draft: DeviceDraft | None = None
        if self.drafter is not None and self.plan is not None:
            draft = self.drafter.device_draft(context, self.plan)
            if draft is None or not grows_on_device(draft.plan):
                return None
        drafter, plan, depth = None, None, 0
        key = self.key(self.judging)
        if draft is not None:
            drafter, context, plan, depth = draft.drafter, draft.context, draft.plan, draft.plan.depth
            caches = tuple((cache.attended, cache.size) for cache in context.caches)
            key = self.key(
                self.judging, type(drafter), self.state_of(draft.module), plan, context.features.shape[1], caches
            )
        return self.steps.run(
            whole_step, key, self.target, drafter, plan, self.accept, self.sampler, context, numbers(depth), active,
            self.num_top,
        )  # fmt: skip

    def step_after_draft(
        self, context: Context, tree: DraftTree, numbers: Callable[[int], Tensor | None], active: Tensor
    ) -> Advance | None:
        """What follows a draft in one graph; None if the host has a part in judging it, or if no other step needs such
        a graph."""
        if self.whole or not self.judges or tree.probs is not None:
            return None
        tree = self.pad(tree)
        key = self.key(self.judging, tree.num_nodes, tree.max_depth, tree.is_chain)
        return self.steps.run(
            step_after_draft, key, self.target, self.accept, self.sampler, context.root, tree,
            numbers(tree.max_depth), active, self.num_top,
        )  # fmt: skip

    def verify(self, tree: DraftTree) -> TargetOutput:
        """The target's pass over the tree, in a graph if other steps need one for trees of this size."""
        if self.whole:
            return self.target.verify(tree)
        num, padded = tree.num_nodes, self.pad(tree)
        out = self.steps.run(verify, self.key(padded.num_nodes), self.target, padded)
        return TargetOutput(out.logits[:, :num], out.features[:, :num])

    def pad(self, tree: DraftTree) -> DraftTree:
        """The tree in the next of the drafter's sizes."""
        nodes, depth = self.target.scratch, self.depth
        sizes = () if self.drafter is None else self.drafter.tree_sizes
        if smaller := [size for size in sizes if tree.num_nodes <= size < nodes]:
            nodes, depth = smaller[0], min(depth, max(tree.max_depth, smaller[0] - 1))
        return tree.padded(nodes, depth)

    @property
    def depth(self) -> int:
        """Of the deepest drafted node."""
        return 0 if self.plan is None or self.drafter is None else self.plan.depth


def grows_on_device(plan: Plan | None) -> bool:
    """Are its trees point masses of one shape, grown on the device?

    A branching tree has more nodes than a chain of its depth; of another one the host would ask whether it branches.
    """
    if type(plan).__hash__ is None:  # no graph can be found by it again
        return False
    if isinstance(plan, StaticTree):
        return True
    return isinstance(plan, BestFirstTree | DynamicTree) and plan.num_nodes > plan.depth + 1


def reason_not_compiled(target: Target) -> str | None:
    """Why steps over this target, after its prefill, are not compiled; None if they are."""
    devices = {str(device) for device in (getattr(target.base, "hf_device_map", None) or {}).values()}
    if target.source is not None:
        return "the passes of an encoder-decoder have many shapes"
    if not target.static:
        return "it was not made with static=True"
    if target.switch is not None:
        return "its positions change with the length of the text"
    if target.inputs.token_types is not None:
        return "it takes token types"
    return f"its layers are on several devices ({', '.join(sorted(devices))})" if len(devices) > 1 else None


def module_state(module: nn.Module) -> tuple:
    """The module, and what of it may change: modes, hooks, adapters, attention, the kind and shape of each tensor."""
    adapters = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
    modules = [
        (
            m.training, id(vars(m).get("forward")), *m._forward_hooks, *m._forward_pre_hooks,
            *(str(getattr(m, name, None)) for name in adapters),
            getattr(getattr(m, "config", None), "_attn_implementation", None),
        )
        for m in module.modules()
    ]  # fmt: skip
    tensors = [(type(t), t.shape, t.dtype, t.device) for t in (*module.parameters(), *module.buffers())]
    tables = [t.shape for m in module.modules() if isinstance(t := getattr(m, "_table", None), Tensor)]
    return ref(module), hash(tuple(modules)), hash(tuple(tensors)), tuple(tables)


def options_as_tensors(processor: Any, device: torch.device) -> Any:
    """A copy of a logits processor whose options that are numbers are tensors, which a graph reads anew."""
    result = copy.copy(processor)
    for name in OPTIONS:
        if isinstance(value := getattr(processor, name, None), float):
            dtype = torch.float32 if device.type == "mps" else torch.float64  # a number's own, where there is one
            setattr(result, name, torch.tensor(value, dtype=dtype, device=device))
    return result


def constants_of(processor: Any) -> tuple:
    """A logits processor's type and the values of its attributes; of tensors, which a graph reads anew, the shapes."""
    return type(processor), tuple(
        (name, (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(vars(processor).items())
    )
