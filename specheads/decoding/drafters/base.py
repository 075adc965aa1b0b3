"""The drafter protocol, and the context that a drafter proposes from.

Shapes: B batch rows, P new positions, F features, K top tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from specheads.decoding.planner import Plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.verifier import Verifier
from specheads.options import refuse_class

T = TypeVar("T")


class Advance(NamedTuple):
    """The result of one step, on the device.

    root (B,): the next one; length (B,): how many tokens each row gained; last (B,): the column of the newest, 0 in a
    row that gained none. following (B, P), features (B, P, F), top (B, P, K): as in `Context`, for the path. columns
    (B, 2 P + 3): all that the host reads of a step, in one tensor.
    """

    root: Tensor
    length: Tensor
    last: Tensor
    following: Tensor
    features: Tensor
    top: Tensor | None
    columns: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """All that a drafter may look at when it proposes.

    root (B,): the last emitted token, not yet in the target's cache.
    features (B, P, F), following (B, P), new (B,): the target's features at the `new` positions committed since the
      last proposal (at first those of the prompt that were read), and the token after each; entries past `new` are
      meaningless.
    last (B,): the column of the newest of them, 0 in a row that has none.
    history: each row's ids up to and including the root, unpadded, on the host.
    memory: what the drafter stores between proposals, such as its KV cache.
    caches: the drafter's, in which `prepare` makes room before each proposal.
    bound: no row has more committed tokens than this (host integer).
    top (B, P, K): the target's likeliest tokens after the new positions, best first; for the prompt only those after
      its last position. None unless the drafter has a `wants_target_top` = K above 0.
    source: each row's source ids if the target has an encoder, unpadded, on the host; None without one or if unknown.
    ranks: the sibling ranks of each row's last accepted drafts, on the host; empty before the first step.
    remaining: how many tokens each row may gain after its root, 0 once it has finished. queue_pending: may a new prompt
      replace the next row that finishes? sampled: are tokens drawn at random?
    """

    target: Verifier
    root: Tensor
    features: Tensor
    following: Tensor
    new: Tensor
    last: Tensor
    history: list[list[int]]
    bound: int
    memory: dict[str, Any] = field(default_factory=dict)
    caches: list[TreeCache] = field(default_factory=list)
    top: Tensor | None = None
    source: list[list[int]] | None = None
    ranks: list[list[int]] = field(default_factory=list)
    remaining: list[int] = field(default_factory=list)
    queue_pending: bool = False
    sampled: bool = False

    def prepare(self) -> None:
        """Make room for a step in the caches of the target and of the drafter, on the host."""
        self.target.prepare(self.bound)
        for cache in self.caches:
            cache.prepare(self.bound)

    def newest(self, values: Tensor) -> Tensor:
        """(B, P, …) → (B, …) at the column `last`."""
        return values[torch.arange(len(values), device=values.device), self.last]

    def memoize(self, name: str, make: Callable[[], T]) -> T:
        """The value that make() returned when `name` was first asked for; kept in `memory`."""
        if name not in self.memory:
            self.memory[name] = make()
        return self.memory[name]

    @classmethod
    def start(
        cls, target: Verifier, ids: Tensor, lengths: Tensor, features: Tensor, root: Tensor, top: Tensor | None = None
    ) -> Context:
        """The context after the prefill of ids (B, T), packed left, of lengths (B,); root (B,): the first new token."""
        last = lengths - 1
        following = torch.cat([ids[:, 1:], ids[:, :1]], 1).scatter(1, last.unsqueeze(1), root.unsqueeze(1))
        new = lengths
        if (kept := target.kept) is not None:
            column = kept.unsqueeze(1) + torch.arange(features.shape[1], device=kept.device)
            following = following.gather(1, column.clamp(max=ids.shape[1] - 1))
            new, last = lengths - kept, last - kept
        rows = zip(ids.tolist(), lengths.tolist(), root.tolist(), strict=True)
        history = [[*row[:length], first] for row, length, first in rows]
        bound, source = ids.shape[1], target.source_ids
        return cls(target, root, features, following, new, last, history, bound, top=top, source=source)

    def extend(self, advance: Advance, emitted: list[list[int]], ranks: list[list[int]]) -> Context:
        """The context after one step; emitted: the tokens each row gained; ranks: as in `Context`."""
        for row, more in zip(self.history, emitted, strict=True):
            row += more
        return replace(
            self,
            root=advance.root,
            features=advance.features,
            following=advance.following,
            new=advance.length,
            last=advance.last,
            bound=max(map(len, self.history)) - 1,
            top=advance.top,
            ranks=ranks,
        )


class DeviceDraft(NamedTuple):
    """A draft made on the device without the host, by drafter.propose(context, sampler, plan); no drafter, no draft.

    module: holds the weights it drafts with, if any. depth: of the tree. Shapes in the context repeat between steps.
    """

    context: Context
    drafter: Drafter | None = None
    plan: Plan | None = None
    module: nn.Module | None = None
    depth: int = 0


@runtime_checkable
class Drafter(Protocol):
    """Proposes a tree of tokens that may follow the root.

    The loop uses nothing of a drafter but what is here. `layers`, `default_plan` and `propose` are required. Subclasses
    inherit defaults for the rest, and `with_defaults` adds them to a drafter that is no subclass.

    layers: target hidden_states it wants (HF indices).
    wants_target_top: how many of the target's likeliest tokens it wants in `Context.top`.
    tree_sizes: node counts of its trees, ascending, for compiled steps; smaller trees are padded. (): the plan's.
    on_device: propose() reads no tensor's value on the host, so it can be compiled with the step.
    gives_draft_probs: its trees can keep the distributions they were drafted from; else its drafts are point masses.
    fixed_depth: tokens it drafts in one pass, the depth of static trees given by name; None if each level takes a pass.
    max_depth: tokens of its longest draft; None: as many as a plan asks for.
    trained_length: tokens of the longest text it was trained on, past which generate() warns; None: no such limit.
    reviews: for each draft of a cascade, its reviews since the run began; () for other drafters.
    longest: tokens of the longest text it can read, past which it drafts nothing; None: no such limit.
    refillable: `refill` can replace a finished row of a batch by another prompt.
    draft_modules: those its passes run, whose products may be our own (kernels/).
    """

    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def wants_target_top(self) -> int:
        return 0

    @property
    def tree_sizes(self) -> tuple[int, ...]:
        return ()

    @property
    def on_device(self) -> bool:
        return False

    def device_draft(self, context: Context, plan: Plan) -> DeviceDraft | None:
        """Called before propose() in compiled decoding: a draft for the device to make; None if propose() must.

        By default an `on_device` drafter drafts there if the step before had the plan's depth, which it does not near
        the end of a text. Before the first step it is called to read all but the last position of the prompt, without
        drafting."""
        if not (self.on_device and context.features.shape[1] == plan.depth + 1):
            return None
        return DeviceDraft(context, self, plan, self if isinstance(self, nn.Module) else None, plan.depth)

    @property
    def gives_draft_probs(self) -> bool:
        return True

    @property
    def fixed_depth(self) -> int | None:
        return None

    @property
    def max_depth(self) -> int | None:
        return None

    @property
    def trained_length(self) -> int | None:
        return None

    @property
    def reviews(self) -> tuple[int, ...]:
        return ()

    @property
    def longest(self) -> int | None:
        return None

    @property
    def refillable(self) -> bool:
        return False

    @property
    def draft_modules(self) -> tuple[nn.Module, ...]:
        return (self,) if isinstance(self, nn.Module) else ()

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan: ...
    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree: ...
    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        """Replace what context.memory holds for these rows by other prompts, each without its last two tokens.

        prompts: the context of the new rows alone, with a memory of its own. In the next proposal each of these rows
        has one new position, the prompt's last, with the root after it. Called between two proposals.
        """
        return


def with_defaults(drafter: Any, name: str = "draft") -> Drafter:
    """The drafter itself if it has all members of `Drafter`, else wrapped with the defaults of those it lacks.

    name: the argument's, for messages. TypeError for what cannot draft; AttributeError if a required member is missing.
    """
    refuse_class(name, drafter, "drafter", "propose")
    if isinstance(drafter, Drafter):
        return drafter
    if not hasattr(drafter, "propose"):
        raise TypeError(
            f"{name}={type(drafter).__name__} cannot propose trees; for a language model, give DraftModel(it)"
        )
    named = type(type(drafter).__name__, (_WithDefaults,), {})  # messages name what drafts
    return cast(Drafter, named(drafter))


class _WithDefaults:
    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        stated = name not in _OPTIONAL or hasattr(type(self._drafter), name)  # its own AttributeError is not hidden
        if stated or hasattr(self._drafter, name):
            return getattr(self._drafter, name)
        return vars(Drafter)[name].__get__(self)


_OPTIONAL = (
    "wants_target_top", "tree_sizes", "on_device", "device_draft", "gives_draft_probs", "fixed_depth", "max_depth",
    "trained_length",
    "reviews", "longest", "refillable", "refill", "draft_modules",
)  # fmt: skip
