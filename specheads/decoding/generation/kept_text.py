"""Text that an earlier call has read: its keys and values, in transformers' cache, and how they come in and out of it.

Shapes: B batch rows, T prompt columns, P columns that the cache holds, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as hf_logging

from specheads.decoding.generation.prompt_batches import left_order
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.hf_base import WITH_BOTH, has_state, layer_reach, text_config
from specheads.decoding.verify.masks import Reach
from specheads.decoding.verify.model_inputs import CACHE_NAMES, Layers, Prefix
from specheads.decoding.verify.verifier import Verifier

logger = hf_logging.get_logger(__name__)

_NO_LAYER = getattr(cache_utils, "DummyLayer", DynamicLayer)  # of a layer that reads another's keys
_TEXT = "_specheads_text"  # of a cache that `keep_text` filled: (its ids (B, P), −1 at padding; a tensor of its layers)


def take_cache(base: PreTrainedModel, arguments: dict[str, Any]) -> DynamicCache | None:
    """The cache among generate()'s arguments, and no longer among them. ValueError or TypeError for one of a kind that
    cannot be read and filled here."""
    given = {name: cache for name in CACHE_NAMES if (cache := arguments.pop(name, None)) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{' and '.join(f'{name}=' for name in given)} are two names of one argument; give one")
    ((name, cache),) = given.items()
    if base.config.is_encoder_decoder:
        raise ValueError(f"{name}=: an encoder-decoder begins its text anew in each call; leave {name}= out")
    if not isinstance(cache, Cache):
        raise TypeError(f"{name}= must be a DynamicCache of transformers, not {type(cache).__name__}")
    kinds: set[Any] = {type(layer) for layer in getattr(cache, "layers", ())}
    kinds |= {getattr(cache, "layer_class_to_replicate", None)} - {None}
    plain = kinds <= {DynamicLayer, DynamicSlidingWindowLayer, _NO_LAYER} or has_state(base)
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False) or not plain:
        of = ", ".join(sorted(kind.__name__ for kind in kinds)) or "other caches"
        raise ValueError(
            f"{name}={type(cache).__name__} of {of} cannot be kept between calls with drafts; give a DynamicCache()"
        )
    return cache


def kept_prefix(
    base: PreTrainedModel, cache: DynamicCache | None, ids: Tensor, arguments: Mapping[str, Any]
) -> Prefix | None:
    """What the cache holds of prompts ids (B, T) under the mask among the arguments; None if the whole text has to be
    read. ValueError if the prompts cannot continue the cache.

    The cache's columns are the first P of the prompts, as in transformers. A cache that no other code has changed since
    it was filled here also knows its text: then only what the prompts have in common with it counts.
    """
    mask = arguments.get("attention_mask")
    if cache is not None and has_state(base):
        logger.warning_once(
            "the states of recurrent layers cannot be kept between calls with drafts: the whole text is read, and the "
            "cache stays as it is"
        )
        return None
    if cache is None or (columns := cache.get_seq_length()) == 0:
        return None
    layers = [_columns_of(layer) for layer in cache.layers]
    batch = next(len(pair[0]) for pair in layers if pair is not None)
    if batch != len(ids) or (mask is not None and mask.shape != ids.shape):
        mask_shape = "none" if mask is None else tuple(mask.shape)
        raise ValueError(
            f"the cache holds {columns} tokens of {batch} rows, for prompts {tuple(ids.shape)} and their mask "
            f"({mask_shape}); give the whole text of each row, the tokens that the cache holds included"
        )
    tokens = ids if mask is None else ids.masked_fill(mask == 0, -1)
    own = _own_text(cache, layers)
    if own is None and columns > ids.shape[1]:
        raise ValueError(
            f"the cache holds {columns} tokens, and the prompts have {ids.shape[1]}; give the whole text, the tokens "
            "that the cache holds included, or a new DynamicCache()"
        )
    held = tokens[:, :columns] if own is None else own.to(ids.device)
    order, lengths = left_order((held >= 0).long()), (held >= 0).sum(1)
    known = torch.minimum(lengths, (tokens >= 0).sum(1) - 1)  # the last token is read, for the logits after it
    if own is not None:
        known = torch.minimum(known, _common(held, tokens))
    if not bool(known.any()):
        return None
    packed: Layers = []
    for index, pair in enumerate(layers):
        if pair is not None and not _reaches(pair[0].shape[2], columns, held, lengths, known, _reach_of(base, index)):
            logger.warning(
                "the cache has dropped tokens that layer %d looks back at from this text: the whole text is read; give "
                "DynamicCache() without config=, which keeps all", index,
            )  # fmt: skip
            return None
        packed.append(None if pair is None else (_pack(pair[0], columns, order), _pack(pair[1], columns, order)))
    return Prefix(packed, known)


def keep_text(
    cache: DynamicCache | None, target: Verifier, rows: Sequence[Sequence[int]], columns: int, mask: Tensor | None
) -> DynamicCache | None:
    """Fill the cache, or a new one, with the keys and values that the target has committed, of all rows up to the last
    token of the shortest. A target whose text cannot be kept leaves the cache as it is.

    rows: the whole texts as transformers has them, padding included; mask (B, T): of their first `columns` tokens.
    """
    if not isinstance(target, Target) or target.has_state:
        return cache
    cache, held = DynamicCache() if cache is None else cache, target.cache
    kept = min(map(len, rows)) - 1
    text = torch.tensor([row[:kept] for row in rows])
    if mask is not None:
        text[:, :columns].masked_fill_(mask.cpu() == 0, -1)
    index = None if bool((text >= 0).all()) else ((text >= 0).cumsum(1) - 1).clamp(min=0)
    for i, source in enumerate(held.tree_layers):
        if cache.layer_class_to_replicate is not None and len(cache.layers) <= i:
            cache.layers.append(cache.layer_class_to_replicate())
        if not source.is_initialized:
            continue
        assert source.keys is not None and source.values is not None
        pair = [_unpack(part[:, :, held.scratch :], kept, index) for part in (source.keys, source.values)]
        layer: Any = cache.layers[i]
        layer.lazy_initialization(*pair)
        first = 0
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length, first = kept, max(0, kept + 1 - layer.sliding_window)
        layer.keys, layer.values = (part[:, :, first:] for part in pair)
    first_keys = next(found[0] for layer in cache.layers if (found := _columns_of(layer)) is not None)
    setattr(cache, _TEXT, (text, first_keys))
    return cache


def _columns_of(layer: Any) -> tuple[Tensor, Tensor] | None:
    """The keys and values that a layer of a cache holds, None if it holds none."""
    keys = getattr(layer, "keys", None)
    return None if keys is None or not keys.numel() else (keys, layer.values)


def _own_text(cache: DynamicCache, layers: Sequence[tuple[Tensor, Tensor] | None]) -> Tensor | None:
    """The ids (B, P) whose keys `keep_text` put into this cache, −1 at padding; None if other code has changed it."""
    text, keys = getattr(cache, _TEXT, (None, None))
    return text if keys is next(pair[0] for pair in layers if pair is not None) else None


def _common(held: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens the rows of held (B, P) and tokens (B, T) have in common from the start (B,), without padding."""
    counts = []
    for ours, theirs in zip(held.tolist(), tokens.tolist(), strict=True):
        pairs = zip([t for t in ours if t >= 0], [t for t in theirs if t >= 0], strict=False)
        counts.append(next((n for n, (one, other) in enumerate(pairs) if one != other), len(tokens[0])))
    return torch.tensor(counts, device=held.device)


def _reach_of(base: PreTrainedModel, index: int) -> Reach:
    """How far back layer `index` of the cache looks; everything if that is not certain."""
    reach = layer_reach(text_config(base))
    if "" in reach:
        return reach[""]
    types = text_config(base).layer_types
    kind = types[index] if index < len(types) else ""
    return reach.get(WITH_BOTH.get(kind, kind), Reach())


def _reaches(kept: int, columns: int, held: Tensor, lengths: Tensor, known: Tensor, reach: Reach) -> bool:
    """Do the last `kept` of so many columns hold all that is seen from position known (B,) on?"""
    if kept >= columns:
        return True
    first = lengths - (held[:, columns - kept :] >= 0).sum(1)  # (B,) the first position that is there
    return reach.kind != "full" and bool((first <= (known - reach.size + 1).clamp(min=0)).all())


def _pack(part: Tensor, columns: int, order: Tensor | None) -> Tensor:
    """The last of `columns` columns (B, heads, n, d) → all of them, packed left by order (B, P'), zeros before them."""
    if part.shape[2] < columns:
        part = torch.cat([part.new_zeros(*part.shape[:2], columns - part.shape[2], part.shape[3]), part], 2)
    return part if order is None else _gather(part, order)


def _unpack(part: Tensor, kept: int, index: Tensor | None) -> Tensor:
    """Committed slots (B, heads, n, d), packed left → the first `kept` columns of the text; index (B, P): their slots,
    None where there is no padding."""
    return part[:, :, :kept] if index is None else _gather(part, index)


def _gather(part: Tensor, index: Tensor) -> Tensor:
    """part (B, heads, n, d) at index (B, m) of its slots."""
    return part.gather(2, index.to(part.device)[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
