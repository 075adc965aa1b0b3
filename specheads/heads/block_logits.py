"""From the slots of a parallel head's block to draft logits: the output matrix, the bias of the path, the confidence.

A slot's own logits U are the base's output matrix times its output h. The tokens drafted before it add W z, of low rank
r, of which there are several forms (layers/markov.py, domino.py, selector.py). The confidence is the head's own
estimate that a draft is accepted: σ(c · [h; e]), e as in markov.py.

Shapes: B batch rows, A anchors of a row, D tokens that a block drafts, k nodes of a level, R rows, H hidden, r rank,
E size of what is read of a token, S state size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specheads.decoding.planner import ChildLogits
from specheads.decoding.planner.plan import Expand
from specheads.heads.config import DecoderConfig
from specheads.heads.layers.domino import Domino
from specheads.heads.layers.markov import GatedMarkov, Markov, RecurrentMarkov
from specheads.heads.layers.selector import Selector, Successors, select, selection_loss
from specheads.heads.limits import DEEPEST
from specheads.heads.vocabulary import DraftVocabulary
from specheads.losses.objective import Drafts
from specheads.options import shown

Embed = Callable[[Tensor], Tensor]
MARKOV: dict[str, type[Markov]] = {
    "vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov, "selector": Selector, "domino": Domino,
}  # fmt: skip


@dataclass(frozen=True)
class BlockOptions(DecoderConfig):
    """markov_rank: rank of the bias of the tokens drafted before; 0 for none.
    markov_type: its form: vanilla, gated or rnn (DSpark's), selector (DFlash 2's) or domino; see heads/layers/.
    candidates: the tokens of a slot among which a selector chooses. selector_weight: of the loss of its choice.
    gru_size: the state of Domino's GRU. plain_drafts: drafts at the start of a block without Domino's correction.
    confidence: learn how likely each draft is accepted; confidence_markov: from the token before, too.
    mask_token_id: the base's token that slots after the root read.
    own_mask: they read an embedding of the head's own instead (default: if there is no mask_token_id). With both,
      programs that the head is exported to put it in that token's place.
    logit_scale, logit_cap: a slot's own logits are scaled, then capped: cap · tanh(logits / cap) (default: neither).
    """

    loss_terms: ClassVar[tuple[str, ...]] = ("confidence", "selector")
    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        "candidates": (1, 1024), "gru_size": (1, 2**16), "plain_drafts": (0, DEEPEST), "conv_taps": (0, DEEPEST),
        "conv_group": (1, 2**20), "selector_weight": (0, 2**20), "logit_scale": (1e-6, 2**20),
        "logit_cap": (1e-3, 2**20),
    }  # fmt: skip

    markov_rank: int = 256
    markov_type: str = "vanilla"
    candidates: int = 16
    selector_weight: float = 1.0
    gru_size: int = 1024
    plain_drafts: int = 1
    confidence: bool = False
    confidence_markov: bool = True
    mask_token_id: int | None = None
    own_mask: bool | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        said = f"{self.kind} head option"
        if self.markov_type not in MARKOV:
            raise ValueError(f"{said} markov_type={shown(self.markov_type)}; expected {', '.join(MARKOV)}")
        if self.markov_type != "vanilla" and not self.markov_rank:
            raise ValueError(f"{said} markov_type={self.markov_type} needs a markov_rank of 1 or more")
        if self.chooses and (self.output_size or self.candidates) < self.candidates:
            raise ValueError(f"{said} candidates={self.candidates} exceeds the {self.output_size} tokens it drafts")
        if self.own_mask is False and self.mask_token_id is None:
            raise ValueError(f"{said} own_mask=false needs a mask_token_id, which slots after the root then read")

    @property
    def chooses(self) -> bool:
        """Whether it only drafts among a slot's likeliest tokens."""
        return MARKOV[self.markov_type].choosing

    @property
    def masks_by_own(self) -> bool:
        """Whether slots after the root read an embedding of the head's own."""
        return self.mask_token_id is None if self.own_mask is None else self.own_mask

    @property
    def reads_tokens(self) -> bool:
        """Whether the head has a table (V, r) of the tokens before."""
        return bool(self.markov_rank) and MARKOV[self.markov_type].embeds

    def markov(self) -> Markov:
        assert self.hidden_size
        if self.markov_type == "domino":
            return Domino(self.hidden_size, self.markov_rank, self.gru_size, self.plain_drafts)
        return MARKOV[self.markov_type](self.hidden_size, self.markov_rank)


class BlockLogits(DraftVocabulary):
    """What a parallel head has after its blocks. A subclass calls `add_outputs` once."""

    config: Any

    def add_outputs(self) -> None:
        c = self.config
        size, rank, drafted = c.hidden_size, c.markov_rank, c.output_size
        self.markov = c.markov()
        if c.reads_tokens:
            self.markov_embed = nn.Embedding(c.vocab_size, rank)
        if rank:
            self.markov_lm_head = (Successors if c.chooses else nn.Linear)(rank, drafted, bias=False)
            nn.init.zeros_(self.markov_lm_head.weight)
        if drafted < c.vocab_size:
            self.lm_head = nn.Linear(size, drafted, bias=False).requires_grad_(False)
        if c.confidence:
            self.confidence = nn.Linear(size + (rank if c.reads_tokens and c.confidence_markov else 0), 1)

    def output_layers(self) -> list[nn.Linear]:
        return [self.lm_head] if self.narrow else []

    def output_parameters(self) -> list[Tensor]:
        markov = [self.markov_lm_head.weight] if self.config.markov_rank else []
        return [*super().output_parameters(), *markov]

    def marginal(self, hidden: Tensor, lm_head: Embed) -> Tensor:
        """A slot's output (…, H) → its own logits (…, Vd), U."""
        logits = self.lm_head(hidden) if self.narrow else lm_head(hidden)
        if (scale := self.config.logit_scale) != 1:
            logits = logits * scale
        return logits if (cap := self.config.logit_cap) is None else (logits / cap).tanh() * cap

    def read_before(self, tokens: Tensor, embed: Embed) -> Tensor:
        """Tokens (…) before those drafted → what is read of them (…, E), nothing without a bias. embed: the base's."""
        if self.config.reads_tokens:
            return self.markov_embed(tokens)
        if self.config.markov_rank:
            return embed(tokens).to(self.dtype)
        return torch.empty(*tokens.shape, 0, dtype=self.dtype, device=tokens.device)

    def confidence_logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Slot outputs (…, H) and `read_before` (…, E) → the logit of the chance that the draft is accepted (…)."""
        reads = self.config.reads_tokens and self.config.confidence_markov
        return self.confidence(torch.cat([hidden, before], -1) if reads else hidden).squeeze(-1)

    # Training

    def rows(self, outputs: Tensor, before: Tensor, learned: Tensor) -> Tensor:
        """Outputs of a block's slots (B, A, D, H) and `read_before` (B, A, D, E), at the drafts learned (B, A, D) →
        (R, H + r): h and z, which `drafts` reads."""
        if not self.config.markov_rank:
            return outputs[learned]
        return torch.cat([outputs[learned], self.markov.along(outputs, before)[learned]], -1)

    def draft_logits(self, hidden: Tensor, depth: int, lm_head: Any) -> Tensor:
        return self.drafts(hidden, lm_head).drafted

    def drafts(self, rows: Tensor, lm_head: Embed, base_share: float = 0.0) -> Drafts:
        """What `rows` (R, H + r) draft by, and what is learnt. base_share: the share of the loss that U has by itself,
        if a bias is learnt with it."""
        rank = self.config.markov_rank
        unary = self.marginal(rows[..., : rows.shape[-1] - rank], lm_head)
        if not rank:
            return Drafts(unary, ((unary, 1.0),))
        z = rows[..., -rank:]
        if not self.config.chooses:
            logits = unary + self.markov_lm_head(z)
            learnt = ((logits, 1 - base_share), (unary, base_share)) if base_share else ((logits, 1.0),)
            return Drafts(logits, learnt)
        successors: Any = self.markov_lm_head
        logits, scores, ids = select(successors, unary, z, self.config.candidates)

        def choose(label: Tensor) -> Tensor:
            of_label = unary.gather(1, label.unsqueeze(1)) + successors(z, label.unsqueeze(1))
            return self.config.selector_weight * selection_loss(scores, ids, label, of_label.squeeze(1))

        return Drafts(logits, ((unary, 1.0),), choose)

    # Drafting

    def expander(self, hidden: Tensor, lm_head: Embed, embed: Embed) -> Expand:
        """`expand` of a plan, over the outputs (B, D, H) of the slots that draft. lm_head, embed: the base's."""
        config, ids = self.config, self.target_ids
        levels = zip(hidden.split(1, 1), self.marginal(hidden, lm_head).split(1, 1), count(), strict=False)
        state: Tensor | None = None  # (B, k, S) after each node of the level above

        def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            nonlocal state
            out, logits, depth = next(levels)  # (B, 1, H), (B, 1, Vd)
            width = tokens.shape[1]
            out, before = out.expand(-1, width, -1), self.read_before(tokens, embed)

            def acceptance() -> Tensor:
                return self.confidence_logits(out, before).sigmoid()

            confidence = acceptance if config.confidence else None
            if not config.markov_rank:
                return ChildLogits(logits, ids, width, confidence)
            if state is not None and parents is not None:
                state = state.gather(1, parents.unsqueeze(2).expand(-1, -1, state.shape[2]))
            z, state = self.markov(out, before, state)
            if depth < self.markov.plain:
                return ChildLogits(logits, ids, width, confidence)
            if config.chooses:
                successors: Any = self.markov_lm_head
                return ChildLogits(select(successors, logits, z, config.candidates)[0], ids, confidence=confidence)
            return ChildLogits(logits + self.markov_lm_head(z), ids, confidence=confidence)

        return expand
