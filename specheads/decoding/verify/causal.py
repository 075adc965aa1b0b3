"""Target: prefill, verify and commit over any Hugging Face decoder-only model, with no modelling code of ours.

Shapes: B batch rows, T prompt columns, N tree nodes, V vocabulary, F = tapped layers × hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.grouped_attention import NAME as GROUPED
from specheads.decoding.verify.grouped_attention import grouped_heads
from specheads.decoding.verify.hf_base import (
    MASKED_ATTENTION,
    RECURRENT,
    UnsupportedModel,
    cache_layers,
    has_state,
    layer_reach,
    logits_of,
    refuse_unsupported,
    takes_mask_dict,
    text_config,
    vocabulary_size,
)
from specheads.decoding.verify.masks import Levels, Reach, additive, visible
from specheads.decoding.verify.model_inputs import (
    PER_TOKEN,
    ModelInputs,
    Prefix,
    cache_argument,
    forward_arguments,
    generated_types,
    input_device,
    similar_lengths,
)
from specheads.decoding.verify.recurrent import RecurrentModule
from specheads.decoding.verify.recurrent_modules import recurrent_modules
from specheads.decoding.verify.rope_switch import rope_switch
from specheads.decoding.verify.taps import captures_of, last_output, last_output_kept, run_tapped
from specheads.decoding.verify.taps import lock as captures_lock
from specheads.decoding.verify.verifier import TargetOutput, Verifier

logger = hf_logging.get_logger(__name__)


class Target(Verifier):
    """The frozen base model as verifier of draft trees: one forward per tree, over a cache that is never recomputed.

    A pass covers all rows, including those that are not `active`. recurrent: the base's modules that carry a state from
    token to token.
    """

    def __init__(
        self, base: PreTrainedModel, layers: tuple[int, ...] = (), *, scratch: int = 1, static: bool = False
    ) -> None:
        """layers: the states to tap, as in taps.py. scratch: the most nodes a tree will have.
        static: keep the shapes of passes few, for compiled steps.

        Raises UnsupportedModel, with the reason, for a model that cannot be served.
        """
        refuse_unsupported(base)
        attention = getattr(text_config(base), "_attn_implementation", None)
        if attention not in (*MASKED_ATTENTION, GROUPED):  # GROUPED: another thread is in a pass
            raise UnsupportedModel(
                f"tree verification needs attention 'sdpa' or 'eager', not {attention!r}; "
                "call base.set_attn_implementation('sdpa') first"
            )
        self.base, self.layers, self.scratch, self.modules = base, layers, scratch, (base,)
        self.name, self.static = type(base).__name__, static
        self.cache_argument = cache_argument(base)
        self.config = text_config(base)
        self.reach = layer_reach(self.config)
        self.embed: Any = base.get_input_embeddings()  # tokens (…) → (…, H)
        self.device = input_device(base)
        self.mask_dict = takes_mask_dict(base)
        self.has_state = has_state(base)
        self.recurrent: Sequence[RecurrentModule] = recurrent_modules(base) if self.has_state else ()
        self.captures = captures_of(base) if layers else None
        self.reads_last_output = last_output(self.config) in layers
        self.offset: Tensor | None = None
        self._patched = False  # inside `patched_forward`?
        self._last_position: Tensor  # (B, 1), on the device so that a compiled step serves every limit
        self.prompt_lengths: Tensor
        self.inputs: ModelInputs
        self.cache: TreeCache

    @torch.no_grad()
    def prefill(
        self, ids: Tensor, lengths: Tensor, *, room: int | Sequence[int], inputs: ModelInputs | None = None
    ) -> TargetOutput:
        inputs = inputs or ModelInputs()
        columns = ids.shape[1]
        if isinstance(room, int):
            self.set_limit(columns + room, len(ids), ids.device)
        else:
            rooms, room = ids.new_tensor(room), max(room)
            self.limit, self._last_position = columns + room, (lengths + rooms - 2).unsqueeze(1)
        self._refuse_slot_scaling()
        self.offset, self.prompt_lengths = inputs.offset(lengths), lengths
        self.base_positions = inputs.base_positions(lengths)
        ahead = 0 if self.offset is None else int((lengths.unsqueeze(1) + self.offset).max()) - columns
        self.switch = rope_switch(self.base, self.config, columns + ahead, max(columns, inputs.columns) + ahead)
        if self.switch and self.switch.rereads and room > self.switch.room and (inputs.prompt or ahead):
            raise UnsupportedModel(
                f"{type(self.base).__name__} reads its text again at {self.switch.boundary} tokens, which cannot "
                "be done for prompts with images or explicit positions; ask for fewer tokens"
            )
        if self.switch and self.switch.kind == "dynamic":
            # A short pass restores the frequencies if an earlier, longer text has changed them.
            self.base(input_ids=ids[:, :1], use_cache=False)  # of all rows: each may have its own adapter
        if inputs.prefix is not None and (reason := self._unfit_prefix(inputs, columns + ahead)):
            logger.warning("the cache is of no use to %s: the whole text is read", reason)
            inputs = replace(inputs, prefix=None)
        self.inputs, self.kept = inputs, None if inputs.prefix is None else inputs.prefix.lengths
        return self._forward_prompts(ids, lengths, inputs)

    def _unfit_prefix(self, inputs: ModelInputs, position: int) -> str:
        """Why prompts up to this position cannot continue keys and values from an earlier call; "" if they can."""
        if others := sorted(set(inputs.prompt) - set(PER_TOKEN)):
            return f"prompts of more than text ({', '.join(f'{name}=' for name in others)})"
        if self.switch is not None and position > self.switch.boundary:
            return f"a text of more than {self.switch.boundary} tokens, where the positions of this model change"
        return ""

    def _forward_prompts(self, ids: Tensor, lengths: Tensor, inputs: ModelInputs) -> TargetOutput:
        """The passes of `prefill`, into a new cache: prompts of similar length share one, so little is padding."""
        batch, columns = ids.shape
        groups = [list(range(batch))]
        if self.switch is None and not self.has_state and inputs.is_text and inputs.rows_may_part:
            groups = similar_lengths(lengths.tolist())
        if len(groups) == 1:
            self.cache = self._new_cache()
            out = self._read_prompts(ids, lengths, inputs)
        else:
            parts, logits, features = [], ids.new_zeros(0), ids.new_zeros(0)
            for rows in map(ids.new_tensor, groups):
                self.cache = self._new_cache()
                part = self._read_prompts(ids[rows, : int(lengths[rows].max())], lengths[rows], inputs)
                parts.append((rows, self.cache))
                if len(parts) == 1:
                    logits = part.logits.new_zeros(batch, *part.logits.shape[1:])
                    features = part.features.new_zeros(batch, columns, part.features.shape[2])
                logits[rows.to(logits.device)] = part.logits
                features[rows.to(features.device), : part.features.shape[1]] = part.features
            self.cache = self._new_cache()
            self.cache.join_rows(parts, batch, columns)
            out = TargetOutput(logits, features)
        if inputs.prefix is None:
            self.cache.load_prompt(lengths, columns)
        return out

    def _new_cache(self) -> TreeCache:
        return TreeCache(
            cache_layers(self.config), self.scratch, self.capacity, static=self.static,
            recurrent=self.recurrent, number_of_states=getattr(self.config, "number_of_conv_states", 1),
        )  # fmt: skip

    def _read_prompts(self, ids: Tensor, lengths: Tensor, inputs: ModelInputs) -> TargetOutput:
        """One pass over prompts, into `cache`, whose layers then hold them."""
        # Packed left, causal prompts need no mask from us: padding comes after everything it could disturb. The base
        # makes its own, or none if its attention kernel is causal; ours would be B × T × T numbers.
        batch, columns = ids.shape
        if self.cache.recurrent is not None:
            self.cache.recurrent.begin_text(lengths.tolist())
        mask: Any = None
        extra = dict(inputs.prompt)
        if inputs.prefix is None:
            position = torch.arange(columns, device=ids.device).expand(batch, columns)
            if inputs.prompt and bool((lengths < columns).any()):
                mask = (position < lengths.unsqueeze(1)).long()
            if inputs.positions is not None:
                position = inputs.positions
            last = lengths - 1
        else:
            position, index, mask, last = self._load_prefix(inputs.prefix, lengths, columns)
            ids, extra = ids.gather(1, index), {name: value.gather(1, index) for name, value in extra.items()}
            if inputs.positions is not None:
                position = inputs.positions.gather(-1, index.expand(*inputs.positions.shape[:-1], -1))
        if "logits_to_keep" in forward_arguments(self.base):
            # Project to the vocabulary only where some row ends. A list, since a tensor might be on another device than
            # the last hidden states of a base that is spread over devices.
            ends = last.tolist()
            kept = sorted(set(ends))
            last = last.new_tensor([kept.index(end) for end in ends])
            extra["logits_to_keep"] = kept
        logits, features = self._forward(ids, position, mask, **extra)
        rows = torch.arange(batch, device=logits.device)
        return TargetOutput(logits[rows, last.to(logits.device)].unsqueeze(1), features)

    def _load_prefix(
        self, prefix: Prefix, lengths: Tensor, columns: int
    ) -> tuple[Tensor, Tensor, Tensor | dict[str, Tensor], Tensor]:
        """Begin a pass over the tokens after the prefix, U columns: their positions and columns in the prompts (B, U),
        the masks, and the last column (B,) of each row."""
        cache, count = self.cache, lengths - prefix.lengths
        cache.load_prefix(prefix.layers, prefix.lengths, int(prefix.lengths.max()))
        cache.prepare(columns)
        position = cache.append(int(count.max()), count)
        query = position.unsqueeze(2)

        def mask(reach: Reach) -> Tensor:
            return additive((cache.positions <= query) & reach(query, cache.positions), self.base.dtype)

        fed = torch.minimum(position, self._last_position)
        return fed, position.clamp(max=columns - 1), self._masks(mask), count - 1

    @torch.no_grad()
    def refill(self, rows: Tensor, ids: Tensor, lengths: Tensor, *, room: Sequence[int]) -> TargetOutput:
        cache = self.cache
        self.limit = max(self.limit, ids.shape[1] + max(room))
        last = (lengths + ids.new_tensor(room) - 2).unsqueeze(1)
        self._last_position = self._last_position.index_copy(0, rows, last)
        self._refuse_slot_scaling()
        out = self._forward_prompts(ids, lengths, ModelInputs(rows_may_part=True))
        cache.replace_rows(rows, self.cache, lengths)
        self.cache, self.prompt_lengths = cache, self.prompt_lengths.index_copy(0, rows, lengths)
        return out

    @torch.no_grad()
    def reread(self, rows: list[list[int]]) -> None:
        """Recompute the cache for the texts of all rows, in a pass that also covers the position after the longest."""
        device, columns = self.cache.lengths.device, max(map(len, rows)) + 1
        lengths = torch.tensor([len(row) for row in rows], device=device)
        ids = torch.tensor([[*row, *[0] * (columns - len(row))] for row in rows], device=device)
        self._forward_prompts(ids, lengths, ModelInputs())

    @property
    def vocab_size(self) -> int:
        return vocabulary_size(self.base)

    @property
    def capacity(self) -> int:
        return self.limit + self.scratch

    @property
    def last_position(self) -> int:
        """The last position that is fed: the text's last token comes after it and is never fed. Nodes past the length
        limit, from which nothing is emitted, are clamped to it and so stay inside learned position tables."""
        return self.limit - 2

    def set_limit(self, limit: int, batch: int, device: torch.device) -> None:
        """Limit the texts of all `batch` rows to `limit` tokens."""
        self.limit = limit
        self._last_position = torch.full((batch, 1), self.last_position, device=device)

    def _refuse_slot_scaling(self) -> None:
        """Llama-4 scales the queries of some layers by cache slot, from floor_scale tokens on."""
        longest = getattr(self.config, "floor_scale", None)
        if longest and getattr(self.config, "attn_temperature_tuning", False) and self.limit >= longest:
            raise UnsupportedModel(
                f"{type(self.base).__name__} scales its attention by cache slot from {longest:g} tokens on; prompt and "
                f"new tokens come to {self.limit}: ask for fewer, or generate with the base model itself"
            )

    def prepare(self, bound: int) -> None:
        self.cache.prepare(bound)

    @torch.no_grad()
    def verify(self, tree: DraftTree) -> TargetOutput:
        if tree.num_nodes > self.scratch:
            raise ValueError(f"a tree of {tree.num_nodes} nodes needs scratch ≥ {tree.num_nodes}, not {self.scratch}")
        cache, topology = self.cache, tree.topology
        cache.open(tree.num_nodes)
        if cache.recurrent is not None:
            cache.recurrent.begin_tree(tree)
        start = cache.lengths
        if self.switch is not None and self.active is not None:  # positions of inactive rows choose frequencies too
            start = torch.where(self.active, start, self.prompt_lengths + self.switch.min_fed)
        position = (start.unsqueeze(1) + topology.depth).clamp(max=self._last_position)

        def mask(reach: Reach) -> Tensor:
            seen = visible(topology.ancestors, topology.depth, cache.lengths, cache.attended, reach)
            return additive(seen, self.base.dtype)

        return TargetOutput(*self._forward_generated(tree.tokens, position, self._masks(mask)))

    def _forward_generated(
        self, ids: Tensor, position: Tensor, mask: Tensor | dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One forward over generated ids (B, N); position (B, N): how many tokens precede each in its row."""
        if self.offset is not None:
            position = position + self.offset
        types = self.inputs.token_types
        arguments = {} if types is None else generated_types(types, self.prompt_lengths, ids.shape[1])
        with grouped_heads(self.base):
            return self._forward(ids, position, mask, **arguments)

    def levels(self) -> Any:
        """An empty tree after the committed text, which `forward_level` grows."""
        if self.cache.recurrent is not None:
            self.cache.recurrent.begin_levels()
        return Levels(self.cache, self.base.dtype)

    @torch.no_grad()
    def forward_level(self, levels: Any, tokens: Tensor, parents: Tensor) -> TargetOutput:
        """One pass over the next level of a tree from `levels`: logits (B, k, V), features (B, k, F).

        tokens (B, k): children of nodes parents (B, k) in the level above, which for the first level is the last
        committed token, index 0. They fill the scratch slots in order, so that `commit` can keep some.
        """
        levels.next_level(parents)
        if self.cache.recurrent is not None:
            self.cache.recurrent.begin_level(parents)
        position = levels.position.clamp(max=self._last_position).expand(-1, tokens.shape[1])
        return TargetOutput(*self._forward_generated(tokens, position, self._masks(levels.mask)))

    def commit(self, path: Tensor, length: Tensor) -> None:
        """Keep the KV of the first length (B,) nodes of path (B, P), and drop the rest of the tree."""
        self.cache.commit(path, length)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return logits_of(self.base, hidden)

    def _masks(self, mask: Callable[[Reach], Tensor]) -> Tensor | dict[str, Tensor]:
        """The masks of all layer types, in the form the model's forward() takes."""
        masks: dict[str, Any] = {name: mask(reach) for name, reach in self.reach.items()}
        if self.recurrent:
            masks |= dict.fromkeys(RECURRENT, None)
        return masks if self.mask_dict else next(iter(masks.values()))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """In the block no other thread changes how the base's modules run, or which hooks they have."""
        recurrent = self.recurrent[0].lock if self.recurrent else nullcontext()
        with recurrent, self._tapped(), captures_lock:
            yield

    @contextmanager
    def patched_forward(self) -> Iterator[None]:
        """In the block, `RecurrentStates` runs the recurrent layers of passes, and tapped layers are captured. A
        compiled step starts inside it, since torch cannot trace how modules are changed."""
        states = self.cache.recurrent
        with self._tapped(), nullcontext() if states is None else states.patched_forward():
            self._patched = True
            try:
                yield
            finally:
                self._patched = False

    @contextmanager
    def _tapped(self) -> Iterator[None]:
        """In the block, the base has the hooks by which its tapped layers are read."""
        captured = nullcontext() if self.captures is None else self.captures.installed()
        last = last_output_kept(self.base, self.layers) if self.reads_last_output else nullcontext()
        with captured, last:
            yield

    def _forward(
        self, ids: Tensor, position: Tensor, mask: Tensor | dict[str, Tensor] | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if (states := self.cache.recurrent) is not None:
            states.shape = ids.shape
        with nullcontext() if self._patched else self.patched_forward():
            out, features = run_tapped(
                self.base, self.base, self.layers, ids,
                input_ids=ids, position_ids=position, attention_mask=mask, use_cache=True,
                **{self.cache_argument: self.cache}, **kwargs,
            )  # fmt: skip
        return out.logits, features
