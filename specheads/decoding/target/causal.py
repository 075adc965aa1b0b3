"""Target: prefill, verify and commit over any Hugging Face decoder-only model, with no modelling code of ours.

Shapes: B batch rows, T prompt columns, N tree nodes, V vocabulary, F = tapped layers × hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from specheads.decoding.target.cache import Levels, Reach, TreeCache, additive, visible
from specheads.decoding.target.model_inputs import ModelInputs
from specheads.decoding.target.rope_switch import RopeSwitch, rope_switch
from specheads.decoding.tree import DraftTree

MASKED_ATTENTION = (None, "sdpa", "eager")  # attention that heeds a 4-D mask


class UnsupportedModel(ValueError):
    """A base model that tree decoding cannot serve; the message says why."""


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """logits (B, N, V); features (B, N, F), the tapped layers concatenated in the order asked for."""

    logits: Tensor
    features: Tensor


def text_config(base: PreTrainedModel) -> Any:
    """The config that holds the language model's sizes (models with several parts nest it)."""
    return base.config.get_text_config(decoder=True)


def unwrapped(base: Any) -> PreTrainedModel:
    """The Hugging Face model to verify with: that inside a peft model, in whose layers the adapters stay active."""
    if getattr(getattr(base, "config", None), "model_type", None) == "specheads":
        raise ValueError(
            "this model already has a head; convert(model.base, ...) gives another SpecModel beside it, and "
            "model.generate(...) decodes with it"
        )
    if hasattr(base, "get_base_model"):
        adapter = getattr(base, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModel(f"{type(adapter).__name__} puts virtual tokens before each prompt, outside the base")
        base = base.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"the base must be a transformers model or the name of one, not {type(base).__name__}")
    return base


def decoder_of(base: Any) -> Any:
    """The text decoder inside: layers and final norm, without the output matrix (and without a vision tower)."""
    # Models name it differently, and some answer get_decoder() with themselves or with another part.
    candidates = (base.get_decoder(), base.base_model, getattr(base, "model", None))
    return next((part for part in candidates if isinstance(part, PreTrainedModel) and part is not base), base)


def forward_arguments(base: PreTrainedModel) -> set[str]:
    """The names that the model's forward() takes. One that takes any, as a wrapper or a decorator does, passes them on:
    then those of its class count too, and of the class that this one derives from."""
    names: set[str] = set()
    for forward in (base.forward, *(vars(cls)["forward"] for cls in type(base).__mro__ if "forward" in vars(cls))):
        parameters = inspect.signature(forward).parameters
        names |= set(parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def layer_reach(config: Any) -> dict[str, Reach]:
    """Layer type → how far back it looks, as the config says; {'': …} where all layers share one mask."""
    # A config keeps any key of its file; only a model whose config declares a window looks through one.
    declared = "sliding_window" in inspect.signature(type(config)).parameters
    window = config.sliding_window if declared and getattr(config, "use_sliding_window", True) else None
    types = set(getattr(config, "layer_types", None) or ())
    known = {
        "full_attention": Reach(),
        "sliding_attention": Reach("sliding", window or 0),
        "chunked_attention": Reach("chunked", getattr(config, "attention_chunk_size", None) or 0),
    }
    if unknown := types - set(known):
        indexed = all("index" in name or "sparse" in name for name in unknown)
        reason = (
            "an indexer chooses which tokens each query sees, whatever mask it is given"
            if indexed
            else ("recurrent state can neither hold a tree nor be rewound")
        )
        raise UnsupportedModel(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}; only full, sliding and chunked "
            f"attention can verify a tree in one pass ({reason})"
        )
    if types - {"full_attention"}:
        return {name: known[name] for name in sorted(types)}
    return {"": Reach("sliding", window) if window and not types else Reach()}


def refuse_unsupported(base: PreTrainedModel) -> None:
    """Raise UnsupportedModel, with the reason, for a base whose attention a mask and position ids do not govern."""
    config = text_config(base)
    name = type(base).__name__
    arguments = forward_arguments(base)
    if base.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; draft heads need a decoder-only one")
    layer_reach(config)
    if getattr(base, "_is_stateful", False):
        raise UnsupportedModel(f"{name} keeps recurrent state, which cannot hold a tree of drafts nor be rewound")
    if "position_ids" not in arguments:
        raise UnsupportedModel(
            f"{name}.forward takes no position_ids (its positions follow the cache slots), so the nodes of a tree "
            "cannot be given their depths"
        )
    if "past_key_values" not in arguments:
        raise UnsupportedModel(f"{name}.forward takes no past_key_values, so there is no cache to verify against")
    if getattr(config, "alibi", False):
        raise UnsupportedModel(f"{name} has alibi=True: its attention biases follow the cache slots, not position_ids")
    if getattr(config, "attention_layers", None):
        raise UnsupportedModel(
            f"{name} masks by cache slot inside its attention layers ({', '.join(sorted(set(config.attention_layers)))}"
            "), so the nodes of a tree cannot be told which of one another they see"
        )
    if base.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head; load it with AutoModelForCausalLM")


_takes_dict: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def takes_mask_dict(base: PreTrainedModel) -> bool:
    """Does forward() want one mask per layer type? Tried once per model, on one token."""
    if base not in _takes_dict:
        reach = layer_reach(text_config(base))
        taken = "" not in reach
        if taken:
            mask = torch.zeros(1, 1, 1, 1, dtype=base.dtype, device=base.device)
            ids = torch.zeros(1, 1, dtype=torch.long, device=base.device)
            try:
                with torch.no_grad():
                    base(input_ids=ids, attention_mask=dict.fromkeys(reach, mask), position_ids=ids, use_cache=False)
            except (AttributeError, TypeError):
                taken = False
        if not taken and len(reach) > 1:
            raise UnsupportedModel(f"{type(base).__name__} has layers of several reaches but takes only one mask")
        _takes_dict[base] = taken
    return _takes_dict[base]


class Target:
    """The frozen base model as verifier of draft trees: one forward a tree, over a cache it never recomputes.

    active (B,): rows whose outputs matter, None for all; here one pass serves all rows anyway.
    source: what an encoder made of the rows (`seq2seq.Source`), None where there is none.
    switch: of a base whose positions depend on the length, else None; pace: the fewest tokens that a row which goes on
    has been fed after its prompt, at which a row that does not stands in `generate()`.
    """

    active: Tensor | None = None
    source: Any = None
    switch: RopeSwitch | None = None
    pace: int = 0

    def __init__(self, base: PreTrainedModel, layers: tuple[int, ...] = (), *, scratch: int = 1) -> None:
        """layers: HF hidden_states indices to tap (0 embeddings, n last); scratch: the most nodes a tree will have.

        Raises UnsupportedModel with the reason for a model that cannot be served.
        """
        refuse_unsupported(base)
        attention = getattr(text_config(base), "_attn_implementation", None)
        if attention not in MASKED_ATTENTION:
            raise UnsupportedModel(
                f"tree verification needs attention 'sdpa' or 'eager', not {attention!r}; "
                "call base.set_attn_implementation('sdpa') first"
            )
        self.base, self.layers, self.scratch = base, layers, scratch
        self.config = text_config(base)
        self.reach = layer_reach(self.config)
        self.embed: Any = base.get_input_embeddings()  # tokens (…) → (…, H)
        self.device = self.embed.weight.device
        self.mask_dict = takes_mask_dict(base)
        self.limit = 0
        self.offset: Tensor | None = None
        self.prompt_lengths: Tensor
        self.inputs: ModelInputs
        self.cache: TreeCache

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor, *, room: int, inputs: ModelInputs | None = None) -> TargetOutput:
        """Commit prompts ids (B, T), packed left, of lengths (B,); `room` more tokens per row will follow.

        inputs: what the model is given besides ids. logits are those behind each row's last token, (B, 1, V); features
        (B, T, F).
        """
        inputs = inputs or ModelInputs()
        columns = ids.shape[1]
        self.limit = columns + room
        self._refuse_slot_scaling()
        self.offset, self.prompt_lengths, self.inputs = inputs.offset(lengths), lengths, inputs
        ahead = 0 if self.offset is None else int((lengths.unsqueeze(1) + self.offset).max()) - columns
        self.switch = rope_switch(self.base, self.config, columns + ahead, max(columns, inputs.columns) + ahead)
        if self.switch and self.switch.rereads and room > self.switch.room and (inputs.prompt or ahead):
            raise UnsupportedModel(
                f"{type(self.base).__name__} reads its text again at {self.switch.boundary} tokens, which is not done "
                "for prompts with images or positions of their own; ask for fewer tokens"
            )
        if self.switch and self.switch.kind == "dynamic":
            # A short pass puts back the frequencies that an earlier, longer text may have left behind.
            self.base(input_ids=ids[:1, :1], use_cache=False)
        return self._read(ids, lengths, inputs)

    def _read(self, ids: Tensor, lengths: Tensor, inputs: ModelInputs) -> TargetOutput:
        """The pass of `prefill`, into a new cache."""
        # Packed left, a causal prompt needs no mask of ours: padding stands behind all it could disturb. The base makes
        # its own, or none at all where its attention kernel is causal; ours would be B × T × T numbers.
        batch, columns = ids.shape
        self.cache = TreeCache(self.config.num_hidden_layers, self.scratch, self.limit + self.scratch)
        position = torch.arange(columns, device=ids.device).expand(batch, columns)
        mask = (position < lengths.unsqueeze(1)).long() if inputs.prompt and bool((lengths < columns).any()) else None
        given = position if inputs.positions is None else inputs.positions
        last, extra = lengths - 1, dict(inputs.prompt)
        if "logits_to_keep" in forward_arguments(self.base):
            kept = last.unique()  # the vocabulary projection only where a row ends
            logits, features = self._forward(ids, given, mask, logits_to_keep=kept, **extra)
            last = torch.searchsorted(kept, last)
        else:
            logits, features = self._forward(ids, given, mask, **extra)
        self.cache.settle(lengths, columns)
        rows = torch.arange(batch, device=logits.device)
        return TargetOutput(logits[rows, last.to(logits.device)].unsqueeze(1), features)

    @torch.no_grad()
    def reread(self, rows: list[list[int]]) -> None:
        """Commit the texts of all rows anew, in a pass that also looks at the position after the longest."""
        device, columns = self.cache.lengths.device, max(map(len, rows)) + 1
        lengths = torch.tensor([len(row) for row in rows], device=device)
        ids = torch.tensor([[*row, *[0] * (columns - len(row))] for row in rows], device=device)
        self._read(ids, lengths, ModelInputs())

    @property
    def last_position(self) -> int:
        """The last position anything is fed at: the last token there is room for follows it and is never fed. Clamped
        to it, nodes past the length limit, of which nothing is emitted, stay inside learned position tables."""
        return self.limit - 2

    def _refuse_slot_scaling(self) -> None:
        """Llama-4 scales the queries of some layers by cache slot, from floor_scale tokens on."""
        longest = getattr(self.config, "floor_scale", None)
        if longest and getattr(self.config, "attn_temperature_tuning", False) and self.limit >= longest:
            raise UnsupportedModel(
                f"{type(self.base).__name__} tunes its attention by cache slot from {longest:g} tokens on; prompt and "
                f"new tokens come to {self.limit}, so ask for fewer or generate with the base model itself"
            )

    @torch.no_grad()
    def verify(self, tree: DraftTree) -> TargetOutput:
        """One pass over all nodes of the tree: logits (B, N, V), features (B, N, F)."""
        if tree.num_nodes > self.scratch:
            raise ValueError(f"a tree of {tree.num_nodes} nodes needs scratch ≥ {tree.num_nodes}, not {self.scratch}")
        cache, topology = self.cache, tree.topology
        cache.open()
        start = cache.lengths
        if self.switch is not None and self.active is not None:  # whose positions choose the frequencies all the same
            start = torch.where(self.active, start, self.prompt_lengths + self.pace)
        position = (start.unsqueeze(1) + topology.depth).clamp(max=self.last_position)

        def mask(reach: Reach) -> Tensor:
            seen = visible(topology.ancestors, topology.depth, cache.lengths, cache.scratch, cache.attended, reach)
            return additive(seen, self.base.dtype)

        return TargetOutput(*self._later(tree.tokens, position, self._masks(mask)))

    def _later(self, ids: Tensor, position: Tensor, mask: Tensor | dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """One forward over generated tokens ids (B, N), of which `position` (B, N) stand before each in its row."""
        if self.offset is not None:
            position = position + self.offset
        return self._forward(ids, position, mask, **self.inputs.later(self.prompt_lengths, ids.shape[1]))

    def levels(self) -> Any:
        """Behind what is committed, a tree to be grown by `forward_level`."""
        return Levels(self.cache, self.base.dtype)

    @torch.no_grad()
    def forward_level(self, levels: Any, tokens: Tensor, parents: Tensor) -> TargetOutput:
        """One pass over the next level of a tree that `levels` began: logits (B, k, V), features (B, k, F).

        tokens (B, k) stand below nodes parents (B, k) of the level before; the first level's below the last token
        committed, whose index is 0. They fill the scratch slots in turn, so that `commit` can keep some.
        """
        levels.next_level(parents)
        position = levels.position.clamp(max=self.last_position).expand(-1, tokens.shape[1])
        return TargetOutput(*self._later(tokens, position, self._masks(levels.mask)))

    def commit(self, path: Tensor, length: Tensor, bound: int) -> None:
        """Keep the KV rows of nodes path (B, P), of which length (B,) are real, and drop the rest of the tree.

        bound: a host integer that no row's committed length now exceeds.
        """
        self.cache.commit(path, length, bound)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return logits_of(self.base, hidden)

    def _masks(self, mask: Callable[[Reach], Tensor]) -> Tensor | dict[str, Tensor]:
        """The masks of all kinds of layers, as the model's forward() takes them."""
        masks = {name: mask(reach) for name, reach in self.reach.items()}
        return masks if self.mask_dict else next(iter(masks.values()))

    def _forward(
        self, ids: Tensor, position: Tensor, mask: Tensor | dict[str, Tensor] | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        out = self.base(
            input_ids=ids,
            position_ids=position,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=kept_states(self.layers),
            **kwargs,
        )
        return out.logits, concat_taps(out.hidden_states, self.layers, ids)


def kept_states(layers: tuple[int, ...]) -> list[int] | bool:
    """What to give a base as output_hidden_states, so that entry k of its hidden_states is there for every k tapped."""
    # transformers 5.23 keeps the entries a list names; before, a list counts from the first layer's output, not from
    # the embeddings: other layers than asked for, without an error.
    return sorted(set(layers)) if hasattr(output_capturing, "resolve_hidden_states_indices") else bool(layers)


def concat_taps(hidden_states: tuple[Tensor | None, ...] | None, layers: tuple[int, ...], like: Tensor) -> Tensor:
    """The tapped hidden_states side by side, (B, T, F); no layers gives F = 0."""
    if not layers:
        return torch.empty(*like.shape, 0, device=like.device)
    assert hidden_states is not None
    if max(layers) >= len(hidden_states):
        raise UnsupportedModel(
            f"layer {max(layers)} cannot be tapped: the base gives hidden_states 0 to {len(hidden_states) - 1}"
        )
    taps = [hidden_states[k] for k in layers]
    assert all(tap is not None for tap in taps)
    return torch.cat([tap.to(taps[-1].device) for tap in taps], dim=-1)  # type: ignore[union-attr]


def logits_of(base: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The base's law from last hidden states (…, H) → logits (…, V): lm_head, then the scale and soft-cap its config
    names, which models apply outside lm_head."""
    lm_head = base.get_output_embeddings()
    logits = lm_head(hidden.to(lm_head.weight.dtype))
    config = text_config(base)
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def lm_head_gives_logits(base: PreTrainedModel) -> bool:
    """Are the base's logits what `logits_of` makes of its last hidden state? Tried on a few tokens; True where the
    weights are not there to try."""
    weight: Any = base.get_input_embeddings().weight
    offloaded = getattr(base, "hf_device_map", None)  # whose weights come when they are called
    if weight.is_meta or not weight.numel() or (not offloaded and any(p.is_meta for p in base.parameters())):
        return True
    ids = torch.arange(4, device=weight.device).unsqueeze(0) % weight.shape[0]
    # Not by output_hidden_states, whose hooks stay in the model and keep it from being pickled.
    hidden = decoder_of(base)(input_ids=ids, use_cache=False).last_hidden_state
    logits, remade = base(input_ids=ids, use_cache=False).logits.float(), logits_of(base, hidden).float()
    return bool((logits - remade.to(logits.device)).abs().max() <= 0.01 * logits.std() + 1e-6)


def refuse_more_than_lm_head(base: PreTrainedModel, kind: str) -> None:
    """UnsupportedModel where a head of that kind, which drafts through the base's output matrix, would not do so."""
    if not lm_head_gives_logits(base):
        raise UnsupportedModel(
            f"{type(base).__name__} does more than its output matrix between the last hidden state and the logits, and "
            f"a head of kind {kind!r} drafts through that matrix alone; use 'eagle3' or 'medusa'"
        )
