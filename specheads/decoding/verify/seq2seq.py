"""Seq2SeqTarget: prefill, verify and commit chains of drafts over Hugging Face encoder-decoders (T5, BART and kin).

Shapes: B batch rows, R rows of one pass, N nodes of a chain, W columns of a pass, S source columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specheads.decoding.planner import Plan
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.hf_base import UnsupportedModel, text_config, vocabulary_size
from specheads.decoding.verify.model_inputs import (
    CACHE_NAMES,
    ModelInputs,
    cache_argument,
    embedding_count,
    forward_arguments,
    input_device,
)
from specheads.decoding.verify.slot_cache import SlotCache
from specheads.decoding.verify.verifier import TargetOutput, Verifier

# The fixed cost of a pass, in columns: measured on a CPU with models the size of T5-small (35) and BART-base (20). An
# accelerator reads the weights in the time it takes to compute a few hundred columns.
PASS_ON_CPU, PASS_ELSEWHERE = 24, 256


@dataclass(frozen=True, slots=True)
class Source:
    """Each row's source, encoded: hidden (B, S, H) with mask (B, S), None if there is no padding.

    ids: the source itself, unpadded, on the host; None if it was given as encoder_outputs or embeddings.
    """

    hidden: Tensor
    mask: Tensor | None
    ids: list[list[int]] | None

    @classmethod
    @torch.no_grad()
    def encode(cls, base: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Source:
        """Run the encoder of `base` once, over rows of ids, none empty. Ids past its vocabulary become its last id."""
        width, device = max(map(len, rows)), input_device(base)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        encoder: Any = base.get_encoder()
        hidden = encoder(
            input_ids=ids.clamp(max=embedding_count(base) - 1), attention_mask=mask, return_dict=True
        ).last_hidden_state
        return cls(hidden, mask, [list(row) for row in rows])


def decoder_start(base: PreTrainedModel) -> int:
    """The token with which generate() begins the decoder's text. ValueError if the model names none."""
    config: Any = base.generation_config
    start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    if not isinstance(start, int):
        raise ValueError(f"{type(base).__name__} names no decoder_start_token_id; set it in its generation config")
    return start


def refuse_unsupported(base: PreTrainedModel) -> None:
    """UnsupportedModel, with the reason, for an encoder-decoder whose decoder cannot verify a chain in one pass."""
    name = type(base).__name__
    arguments = forward_arguments(base)
    for needed, spellings in {
        "encoder_outputs": {"encoder_outputs"}, "decoder_input_ids": {"decoder_input_ids"}, "cache": {*CACHE_NAMES}
    }.items():  # fmt: skip
        if not arguments & spellings:
            raise UnsupportedModel(f"{name}.forward takes no {needed}, so its decoder cannot run over a cache alone")
    config, parts = text_config(base), list(base.get_decoder().modules())
    if base.main_input_name != "input_ids":
        raise UnsupportedModel(f"the encoder of {name} reads {base.main_input_name}; only text to text is supported")
    if getattr(base, "_is_stateful", False) or config.model_type == "prophetnet":
        raise UnsupportedModel(f"the decoder of {name} takes one token at a time, so it cannot verify a draft")
    # M2M100, NLLB, FSMT, decoders of RoBERTa's kind: after a padding id in a draft, positions would be off by one.
    if any(hasattr(part, name) for part in parts for name in ("create_position_ids_from_input_ids", "make_positions")):
        raise UnsupportedModel(f"{name} counts positions by which ids are padding, and a draft may hold padding ids")
    if getattr(config, "expert_capacity", None):
        raise UnsupportedModel(
            f"{name} has experts of limited capacity: a token's probabilities depend on what is fed with it"
        )


def make_target(
    base: PreTrainedModel,
    layers: tuple[int, ...] = (),
    *,
    scratch: int = 1,
    source: Source | None = None,
    decoder_mask: Tensor | None = None,
    static: bool = False,
) -> Target | Seq2SeqTarget:
    """The verifier for a base: an encoder-decoder if `source` is given, else a decoder-only model.

    static: as in `Target`; ignored for an encoder-decoder.
    Raises UnsupportedModel for a base that cannot be served, and for tapped layers of an encoder-decoder.
    """
    if source is None:
        return Target(base, layers, scratch=scratch, static=static)
    if layers:
        raise UnsupportedModel(
            f"{type(base).__name__} is an encoder-decoder model, and draft heads are for decoder-only ones; draft with "
            "DraftModel(a smaller encoder-decoder), PromptLookup(), MaxGram() or NGram(...)"
        )
    return Seq2SeqTarget(base, source, scratch=scratch, decoder_mask=decoder_mask)


def refuse_branching(base: PreTrainedModel, plan: Plan) -> None:
    """ValueError for a plan whose trees branch."""
    if plan.num_nodes != plan.depth + 1:
        raise ValueError(
            f"chains only: {type(base).__name__} takes no position_ids, its decoder's positions follow the cache, so "
            f"two nodes cannot share a depth as in {plan}; give tree=chain(4), SampledTree((1,) * 4) or "
            "AdaptiveChain(), and drafters of runs width=1"
        )


class Seq2SeqTarget(Verifier):
    """The decoder of an encoder-decoder as verifier of chains, over a cache in which slot t holds position t.

    These models take no position_ids: the decoder derives positions (T5's relative bias, BART's learnt table) from
    the number of tokens in its cache and the column of the pass, the same for all rows. So a row's nodes are fed in
    the columns of its own positions; the columns around them are padding and not kept. Rows whose lengths have drifted
    so far apart that padding costs more than another pass get separate passes (`group_passes`; a batch of 1 has one
    pass a step). An accepted chain is already in its slots, so committing only advances the lengths.

    The caller runs the encoder, once (`Source`). Keys and values of cross-attention are computed in prefill.
    Rows that are not `active` are left out of passes and get zero logits.
    """

    is_encoder_decoder = True

    def __init__(
        self, base: PreTrainedModel, source: Source, *, scratch: int = 1, decoder_mask: Tensor | None = None
    ) -> None:
        """scratch: the most nodes a chain will have. decoder_mask (B, T): 0 where the decoder's prompt is padding.

        Raises UnsupportedModel, with the reason, for a model that cannot be served.
        """
        refuse_unsupported(base)
        self.base, self.scratch = base, scratch
        self.name = type(base).__name__
        self.cache_argument = cache_argument(base)
        self.source, self.source_ids, self.decoder_mask = source, source.ids, decoder_mask
        self.cache: SlotCache
        self._cross: Any
        self._cross_of_all: list[tuple[Any, Any]]  # per layer, the keys and values of all rows

    @property
    def vocab_size(self) -> int:
        return vocabulary_size(self.base)

    @property
    def last_position(self) -> int:
        """The last position that is fed: the text's last token comes after it and is never fed."""
        return self.limit - 2

    @torch.no_grad()
    def prefill(
        self, ids: Tensor, lengths: Tensor, *, room: int | Sequence[int], inputs: ModelInputs | None = None
    ) -> TargetOutput:
        """As in `Verifier`, for the decoder's prompts; there are no features."""
        self.limit = ids.shape[1] + (room if isinstance(room, int) else max(room))
        self._cross, self._cross_of_all = DynamicCache(), []
        self.cache = SlotCache(len(ids), self.limit, torch.zeros_like(lengths))
        logits = self._feed(ids, [0] * len(ids))
        self.cache.lengths = lengths
        last = (lengths - 1).to(logits.device)
        return TargetOutput(
            logits[torch.arange(len(ids), device=logits.device), last].unsqueeze(1), self._no_features(ids)
        )

    @torch.no_grad()
    def verify(self, tree: DraftTree) -> TargetOutput:
        """Logits (B, N, V) at all nodes of chains, in one pass if the rows' lengths are near (see the class)."""
        node = torch.arange(tree.num_nodes, device=tree.parents.device)
        if not bool(((tree.parents == node - 1) | (tree.parents < 0)).all()):
            raise ValueError(
                f"chains only: {type(self.base).__name__} takes no position_ids, so two nodes of a draft cannot share "
                "a depth; give tree=chain(4) or AdaptiveChain(), and drafters of runs width=1"
            )
        return TargetOutput(self._feed(tree.tokens, self.cache.lengths.tolist()), self._no_features(tree.tokens))

    def levels(self) -> Any:
        """An empty chain after the committed text, which `forward_level` grows."""
        return _Depth()

    @torch.no_grad()
    def forward_level(self, levels: Any, tokens: Tensor, parents: Tensor) -> TargetOutput:
        """One pass over the next token (B, 1) of a growing chain: logits (B, 1, V)."""
        if tokens.shape[1] != 1:
            raise ValueError(
                f"chains only: a draft of {type(self.base).__name__} has one node a level, not {tokens.shape[1]}"
            )
        start = [length + levels.depth for length in self.cache.lengths.tolist()]
        levels.depth += 1
        return TargetOutput(self._feed(tokens, start), self._no_features(tokens))

    def commit(self, path: Tensor, length: Tensor) -> None:
        """Keep the first length (B,) nodes of the chains last fed. A chain needs no path."""
        self.cache.lengths = self.cache.lengths + length

    def _no_features(self, ids: Tensor) -> Tensor:
        return torch.empty(*ids.shape, 0, device=ids.device)

    def _feed(self, ids: Tensor, start: list[int]) -> Tensor:
        """ids (B, N), the first of row b at position start[b] → logits (B, N, V)."""
        active = [True] * len(start) if self.active is None else self.active.tolist()
        rows = [b for b, takes_part in enumerate(active) if takes_part and start[b] <= self.last_position]
        overhead = PASS_ON_CPU if ids.device.type == "cpu" else PASS_ELSEWHERE
        logits = None
        for group in group_passes([start[b] for b in rows], ids.shape[1], overhead):
            batch_rows = [rows[i] for i in group]
            group_logits = self._pass(ids[batch_rows], [start[b] for b in batch_rows], batch_rows)
            if len(batch_rows) == len(start):
                return group_logits
            if logits is None:
                logits = group_logits.new_zeros(*ids.shape, group_logits.shape[-1])
            logits[batch_rows] = group_logits
        if logits is None:
            logits = torch.zeros(*ids.shape, vocabulary_size(self.base), dtype=self.base.dtype, device=ids.device)
        return logits

    def _pass(self, ids: Tensor, start: list[int], rows: list[int]) -> Tensor:
        """One forward over ids (R, N) at their positions: logits (R, N, V). Past the length limit, where position
        tables may end, nothing is fed and logits are meaningless."""
        first, num = min(start), ids.shape[1]
        width = min(max(start) - first + num, self.last_position + 1 - first)
        offset = torch.tensor(start, device=ids.device).unsqueeze(1) - first  # (R, 1)
        node = torch.arange(width, device=ids.device) - offset  # (R, W): the node in each column
        index = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else torch.tensor(rows)
        write_mask = None if width == num and first == max(start) else (node >= 0) & (node < num)
        self.cache.open(index, first, width, write_mask)
        logits = self._forward_rows(ids.gather(1, node.clamp(0, num - 1)), index, first + width)
        if write_mask is None:
            return logits
        column = (torch.arange(num, device=ids.device) + offset).clamp(max=width - 1).to(logits.device)
        return logits.gather(1, column.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))

    def _forward_rows(self, ids: Tensor, rows: slice | Tensor, end: int) -> Tensor:
        """The decoder over ids (R, W) of these batch rows, after what the cache holds: logits (R, W, V)."""
        mask = None
        if self.decoder_mask is not None:
            mask = self.decoder_mask[rows][:, :end]
            mask = torch.cat([mask, mask.new_ones(len(ids), end - mask.shape[1])], 1)
        for layer, (keys, values) in zip(self._cross.layers, self._cross_of_all, strict=True):
            layer.keys, layer.values = keys[rows], values[rows]
        out = self.base(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.source.hidden[rows]),
            attention_mask=None if self.source.mask is None else self.source.mask[rows],
            decoder_input_ids=ids,
            decoder_attention_mask=mask,
            use_cache=True,
            **{self.cache_argument: EncoderDecoderCache(self.cache, self._cross)},
        )
        if not self._cross_of_all:
            self._cross_of_all = [(layer.keys, layer.values) for layer in self._cross.layers]
        return out.logits


@dataclass
class _Depth:
    """How many tokens of a growing chain have been fed."""

    depth: int = 0


def group_passes(start: Sequence[int], num: int, overhead: int) -> list[list[int]]:
    """Rows that begin at positions `start`, of `num` tokens each → groups of rows to feed in one pass each.

    A pass over rows that begin between positions a and b costs overhead + rows · (b − a + num) columns. The groups
    minimise the total.
    """
    order = sorted(range(len(start)), key=start.__getitem__)
    best = [(0, 0)]  # entry i: the least cost of the first i rows in order, and where its last pass begins
    for stop in range(1, len(order) + 1):
        reach = start[order[stop - 1]] + num
        best.append(min((best[i][0] + overhead + (stop - i) * (reach - start[order[i]]), i) for i in range(stop)))
    groups, stop = [], len(order)
    while stop:
        begin = best[stop][1]
        groups.append(sorted(order[begin:stop]))
        stop = begin
    return groups[::-1]
