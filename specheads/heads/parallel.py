"""The parallel block head: one forward pass drafts a whole block.

A block is the root's embedding followed by mask embeddings. Its queries attend to the target's tapped features at every
position before the root and, causally, to the block itself. The base's output matrix gives the logits of each slot, and
a low-rank Markov bias adds the effect of the token drafted before it. DFlash (arXiv:2602.06036: bidirectional inside
the block), DSpark (arXiv:2607.05147: the bias, the confidence), JetSpec (arXiv:2606.18394: causal, best-first trees).

With sample_from_anchor a slot predicts the token after its position, as in DSpark: K slots draft K tokens. Without it a
slot predicts the token at its position, as in DFlash and JetSpec: the root's slot drafts nothing, but the others attend
to it, so K slots draft K − 1 tokens.

Shapes: B batch rows, T positions, F tapped features, H hidden, A anchors of a row, K slots of a block, D tokens it
drafts, M slots of several blocks, r Markov rank, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.kernels.int8_linear import applied_weight
from specheads.decoding.planner import BestFirstTree, ChildLogits, Plan
from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.hf_base import UnsupportedModel, layer_count, logits_of, refuse_more_than_lm_head
from specheads.decoding.verify.masks import Reach, additive, visible
from specheads.heads.base import TapBatch
from specheads.heads.config import DecoderConfig
from specheads.heads.layers.block import ContextBlock, RMSNorm, copy_norm, final_norm, keep_committed
from specheads.heads.sampling import AnchoredBlocks
from specheads.heads.vocabulary import DraftVocabulary, check_draft_vocabulary
from specheads.losses.chunked import calls_of_all
from specheads.losses.targets import tokens_left

# Slots of a training row per pass. Blocks are masked from one another, so too many slots waste attention; too few leave
# a GPU idle.
SLOTS_AT_ONCE = {"cpu": 128, "cuda": 2048}
Attend = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class ParallelConfig(DecoderConfig):
    """taps: the states read, as in decoding/verify/taps.py. draft_vocab_size: tokens the head can draft (default: all).
    block_size: slots of a block, the root's included.
    sample_from_anchor: true: a slot predicts the token after its position; false: the token at its position, as in
      DFlash and JetSpec.
    causal: false: slots attend to one another in both directions, as in DFlash.
    markov_rank: rank of the Markov bias; 0 for none.
    confidence: learn how likely each draft is accepted.
    mask_token_id: the base's token that slots after the root read (default: an embedding of the head's own).
    anchors: blocks per row that a training step samples. The accepted length it logs counts each of them once.
    decay: the loss of the draft at depth j has weight decay^j; published: e^(−1/4) for blocks of 8, e^(−1/7) for 16.
    draft_depth: the default tree's depth.

    With a draft vocabulary the head keeps the base's output rows of its tokens, frozen.
    """

    kind: ClassVar[str] = "parallel"
    loss_terms: ClassVar[tuple[str, ...]] = ("confidence",)

    loss: str = "kl"
    draft_vocab_size: int | None = None
    taps: tuple[int, ...] | None = None
    num_layers: int = 2
    block_size: int = 8
    sample_from_anchor: bool = True
    causal: bool = True
    markov_rank: int = 256
    confidence: bool = False
    mask_token_id: int | None = None
    anchors: int = 512
    decay: float = 0.78
    draft_depth: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)
        if not self.num_drafted:
            raise ValueError("a block of one slot, the root's, drafts nothing where sample_from_anchor is false")

    @property
    def layers(self) -> tuple[int, ...]:
        return self.taps or ()

    @property
    def output_size(self) -> int | None:
        return self.draft_vocab_size or self.vocab_size

    @property
    def max_depth(self) -> int:
        return self.num_drafted  # the whole block, of which the default tree drafts only the first draft_depth

    @property
    def num_drafted(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.silent_slots

    @property
    def silent_slots(self) -> int:
        """Slots at the start of a block that draft nothing: the root's, if slots predict their own position."""
        return 0 if self.sample_from_anchor else 1

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        defaults, size = super().base_defaults(base_config), base_config.vocab_size
        if self.mask_token_id is not None and self.mask_token_id >= size:
            raise ValueError(f"mask_token_id={self.mask_token_id} is no token of a vocabulary of {size}")
        return {**defaults, "taps": self.default_taps(layer_count(base_config)), "draft_vocab_size": size}

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """Five layers, evenly spaced from the second's output to the third last's."""
        first, last = (2, num_layers - 2) if num_layers > 5 else (min(1, num_layers), num_layers)
        return tuple(sorted({round(first + i * (last - first) / 4) for i in range(5)}))


class ParallelHead(DraftVocabulary):
    Config = ParallelConfig
    config: ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        c = config
        assert c.hidden_size and c.vocab_size and c.draft_vocab_size and c.taps
        size, rank, drafted = c.hidden_size, c.markov_rank, c.draft_vocab_size
        self.fc = nn.Linear(len(c.taps) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=c.rms_norm_eps)
        self.decoder = nn.ModuleList(ContextBlock(**c.block_sizes()) for _ in range(c.num_layers))
        self.norm = RMSNorm(size, eps=c.rms_norm_eps)
        self.rotary = c.rotary()
        if c.mask_token_id is None:
            self.mask_embed = nn.Embedding(1, size)  # a module, because ZeRO-3 gathers its weight when it is called
            nn.init.normal_(self.mask_embed.weight, std=0.02)
        if rank:
            self.markov_embed = nn.Embedding(c.vocab_size, rank)
            self.markov_lm_head = nn.Linear(rank, drafted, bias=False)
            nn.init.zeros_(self.markov_lm_head.weight)
        if drafted < c.vocab_size:
            self.lm_head = nn.Linear(size, drafted, bias=False).requires_grad_(False)
        if config.confidence:
            self.confidence = nn.Linear(size + rank, 1)

    def passes(self, length: int) -> float:
        return 1 + min(self.config.anchors, length) * self.config.block_size / length

    @property
    def scored_depths(self) -> int:
        return self.config.num_drafted

    def refuse_unfit(self, base: Any) -> None:
        refuse_more_than_lm_head(base, self.config.kind)
        weight = applied_weight(base.get_output_embeddings())
        if self.narrow and not weight.is_meta:
            probe = torch.randn(4, weight.shape[-1], device=weight.device, dtype=weight.dtype)
            if not torch.allclose(F.linear(probe, weight), logits_of(base, probe), rtol=1e-4, atol=1e-4):
                raise UnsupportedModel(
                    f"{type(base).__name__} scales, caps or shifts its logits (a bias, an adapter), which a draft "
                    "vocabulary's rows alone do not; leave draft_vocab_size out"
                )

    def copy_frozen_weights(self, base: Any) -> None:
        self.copy_output_rows(base)

    def initialise(self, base: Any) -> None:
        copy_norm(self.norm, final_norm(base))

    def set_draft_vocabulary(self, counts: Tensor, base: Any = None) -> None:
        if base is None and self.narrow:
            raise ValueError(
                "a parallel head drafts through the base's output rows: give the base with the token counts"
            )
        super().set_draft_vocabulary(counts, base)

    def output_layers(self) -> list[nn.Linear]:
        return [self.lm_head] if self.narrow else []

    def output_parameters(self) -> list[Tensor]:
        markov = [self.markov_lm_head.weight] if self.config.markov_rank else []
        return [*super().output_parameters(), *markov]

    def draft_logits(self, hidden: Tensor, depth: int, lm_head: Any) -> Tensor:
        """hidden (…, H + r): a slot's output and the Markov embedding of the token before its own (`append_markov`)."""
        if not self.config.markov_rank:
            return self.marginal(hidden, lm_head)
        rank = self.config.markov_rank
        return self.marginal(hidden[..., :-rank], lm_head) + self.markov_lm_head(hidden[..., -rank:])

    def marginal(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """A slot's output (…, H) → its logits (…, Vd) without the Markov bias."""
        return self.lm_head(hidden) if self.narrow else lm_head(hidden)

    # Inputs and outputs of a block

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features (B, T, F) → the context (B, T, H)."""
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    def slots(self, tokens: Tensor, count: int, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Roots (B, A) → inputs of the first `count` slots of their blocks (B, A · count, H)."""
        mask_id = self.config.mask_token_id
        # new_full, because new_tensor would copy from the host and wait.
        mask = self.mask_embed(tokens.new_zeros(1)) if mask_id is None else embed(tokens.new_full((1,), mask_id))
        root = embed(tokens).to(self.dtype).unsqueeze(2)
        return torch.cat([root, mask.to(self.dtype).expand(*tokens.shape, count - 1, -1)], 2).flatten(1, 2)

    def forward(self, x: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Slots (B, M, H) at positions (B, M) → their outputs (B, M, H). attend(layer, keys, values): the slots' own →
        all keys and values that they attend, and the mask."""
        rotary = self.rotary(position)
        for i, layer in enumerate(self.decoder):
            x = self.maybe_checkpoint(layer, x, rotary, lambda k, v, i=i: attend(i, k, v))
        return self.norm(x)

    def append_markov(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Slot outputs (…, H) and the tokens (…) before those drafted → (…, H + r), the input of `draft_logits`."""
        return torch.cat([hidden, self.markov_embed(before)], -1) if self.config.markov_rank else hidden

    # Training

    def outputs(self, batch: TapBatch, blocks: AnchoredBlocks) -> Tensor:
        """(B, A, D, H) outputs of the slots that draft. A block sees itself, and the positions before its anchor in the
        same document."""
        size, context = self.config.block_size, self.fuse(batch.features)
        self.rotary.ensure(int(batch.position_ids.max()) + size, context)
        rotary = self.rotary(batch.position_ids)
        context_keys_values = [layer.keys_values(context, rotary) for layer in self.decoder]  # type: ignore[operator]
        column, slot = (torch.arange(n, device=context.device) for n in (batch.tokens.shape[1], size))
        inside = torch.ones(size, size, device=context.device)
        if self.config.causal:
            inside = inside.tril()
        outputs = []
        at_once = SLOTS_AT_ONCE.get(context.device.type, SLOTS_AT_ONCE["cpu"])
        parts = list(blocks.anchors.split(max(1, at_once // size), 1))
        parts += [blocks.anchors[:, :0]] * (calls_of_all(len(parts), context.device) - len(parts))
        for anchors in parts:
            number = anchors.shape[1]
            same = batch.documents.unsqueeze(1) == batch.documents.gather(1, anchors).unsqueeze(2)
            before = same & (column < anchors.unsqueeze(2))  # (B, A, T)
            same_block = torch.kron(torch.eye(number, device=context.device), inside).bool()
            mask = torch.cat([before.repeat_interleave(size, 1), same_block.expand(len(anchors), -1, -1)], 2).unsqueeze(
                1
            )

            def attend(i: int, k: Tensor, v: Tensor, mask: Tensor = mask) -> tuple[Tensor, Tensor, Tensor]:
                keys, values = context_keys_values[i]
                return torch.cat([keys, k], 2), torch.cat([values, v], 2), mask

            position = (batch.position_ids.gather(1, anchors).unsqueeze(2) + slot).flatten(1)
            x = self.slots(batch.tokens.gather(1, anchors), size, batch.embed)
            outputs.append(self(x, position, attend).unflatten(1, (number, size))[:, :, self.config.silent_slots :])
        return torch.cat(outputs, 1)

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        sample = (config.anchors, batch.keys()) if self.training else ()
        blocks = AnchoredBlocks.sample(batch.supervised, batch.documents, config.num_drafted, *sample)
        targets = blocks.targets(batch.tokens, tokens_left(batch.supervised, batch.documents))
        before = batch.tokens.flatten()[targets.positions]
        rows = self.append_markov(self.outputs(batch, blocks)[blocks.learned], before)
        weights = tuple(config.decay**j for j in range(config.num_drafted))
        scores = self.score(batch, targets, [rows], weights, overlaps=config.confidence)
        total, terms = scores.total / batch.denominator, scores.terms(batch.denominator)
        if config.confidence:
            assert scores.alphas is not None
            confidence = at_least_float32(self.confidence(rows))
            alphas = scores.alphas.to(confidence.dtype)
            loss = F.binary_cross_entropy_with_logits(confidence, alphas, reduction="none")
            weight = targets.weights * loss.new_tensor(weights)[targets.depths]
            terms["confidence"] = (loss.detach() * targets.weights).sum() / batch.denominator
            total = total + (loss * weight).sum() / batch.denominator
        return total, terms

    # Drafting

    def usual_plan(self, device: torch.device) -> Plan:
        # With a Markov bias each beam needs its own row of logits. On a CPU each node also costs the target time.
        budget, beams = (128, 32) if device.type == "cuda" else (8, None)
        depth = min(self.config.draft_depth, self.config.num_drafted, budget - 1)
        return BestFirstTree(budget, depth, beams=beams)

    def read_context(self, context: Context, scratch: int) -> TreeCache:
        """The head's own cache, with keys and values of every position before the root."""
        features = self.fuse(context.features)

        def write(cache: TreeCache, position: Tensor, fresh: bool) -> None:
            rotary = self.rotary(position)
            for i, layer in enumerate(self.decoder):
                cache.update(*layer.keys_values(features, rotary), i)  # type: ignore[operator]

        return keep_committed(context, scratch, features, len(self.decoder), self.rotary, write)[1]

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        config, target = self.config, context.target
        if plan.depth > config.num_drafted:
            raise ValueError(
                f"a tree {plan.depth} deep needs a block that drafts as many tokens; this parallel head's drafts "
                f"{config.num_drafted} (block_size={config.block_size})"
            )
        # Causal slots do not see later ones, so those beyond the plan are left out.
        count = plan.depth + config.silent_slots if config.causal else config.block_size
        cache = self.read_context(context, max(max(plan.depth + 1, plan.drafting_slots) + config.silent_slots, count))
        if plan.depth == 0:
            return DraftTree.root_only(context.root)
        cache.open(count)
        slot = torch.arange(count, device=cache.lengths.device).expand(len(cache.lengths), -1)
        inside = torch.ones(len(slot), count, count, dtype=torch.bool, device=slot.device)
        inside = inside.tril() if config.causal else inside
        seen = visible(inside, slot, cache.lengths, cache.attended, Reach())
        mask = additive(seen, self.dtype)

        def attend(i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return *cache.update(k, v, i), mask

        x = self.slots(context.root.unsqueeze(1), count, target.embed)
        hidden = self(x, cache.lengths.unsqueeze(1) + slot, attend)[:, config.silent_slots :]
        ids = self.target_ids
        levels = zip(hidden.split(1, 1), self.marginal(hidden, target.lm_head).split(1, 1), strict=True)

        def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            out, logits = next(levels)  # (B, 1, H), (B, 1, Vd)
            width = tokens.shape[1]

            def acceptance() -> Tensor:
                return self.confidence(self.append_markov(out.expand(-1, width, -1), tokens)).squeeze(2).sigmoid()

            confidence = acceptance if config.confidence else None
            if not config.markov_rank:
                return ChildLogits(logits, ids, width, confidence)
            return ChildLogits(logits + self.markov_lm_head(self.markov_embed(tokens)), ids, confidence=confidence)

        assert config.vocab_size is not None
        return plan.grow(context.root, expand, sampler, config.vocab_size)
