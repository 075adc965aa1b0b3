"""The parallel block head: one forward pass drafts a whole block.

A block is the root's embedding followed by mask embeddings. Its queries attend to the target's tapped features at every
position before the root and, causally, to the block itself. The base's output matrix gives the logits of each slot, and
a low-rank bias adds the effect of the tokens drafted before it. DFlash (arXiv:2602.06036: bidirectional inside the
block), DSpark (arXiv:2607.05147: the bias, the confidence), JetSpec (arXiv:2606.18394: causal, best-first trees),
DFlash 2 (a convolution over slots, a selector), Domino (a recurrent bias). Their formulas: heads/layers/.

With sample_from_anchor a slot predicts the token after its position, as in DSpark: K slots draft K tokens. Without it a
slot predicts the token at its position, as in DFlash and JetSpec: the root's slot drafts nothing, but the others attend
to it, so K slots draft K − 1 tokens.

Shapes: B batch rows, T positions, F tapped features, H hidden, A anchors of a row, K slots of a block, D tokens it
drafts, M slots of several blocks, r rank of the bias, Vd draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.kernels.int8_linear import applied_weight
from specheads.decoding.planner import BestFirstTree, Plan
from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.grouped_attention import grouped_attention
from specheads.decoding.verify.hf_base import UnsupportedModel, layer_count, logits_of, refuse_more_than_lm_head
from specheads.decoding.verify.masks import additive, visible
from specheads.heads.base import TapBatch
from specheads.heads.block_logits import BlockLogits, BlockOptions, Embed
from specheads.heads.layers.block import ContextBlock, RMSNorm, copy_norm, final_norm, keep_committed, soften
from specheads.heads.layers.convolution import ConvolvedBlock
from specheads.heads.layers.domino import base_share
from specheads.heads.layers.row_attention import RowMask, row_attention
from specheads.heads.sampling import AnchoredBlocks
from specheads.heads.vocabulary import check_draft_vocabulary, check_mask_token
from specheads.losses.chunked import calls_of_all
from specheads.losses.targets import tokens_left

# Slots of a training row per pass: enough for a GPU, and few enough for a CPU's cache.
SLOTS_AT_ONCE = {"cpu": 128, "cuda": 2048}
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ParallelConfig(BlockOptions):
    """taps: the states read, as in decoding/verify/taps.py. draft_vocab_size: tokens the head can draft (default: all).
    block_size: slots of a block, the root's included.
    sample_from_anchor: true: a slot predicts the token after its position; false: the token at its position, as in
      DFlash and JetSpec.
    causal: false: slots attend to one another in both directions, as in DFlash.
    causal_windows: the same for layers with a window (default: as causal). DFlash's readers take true, with causal
      false, if a config does not say. A window holds at least a block, and each slot counts it from its own position.
    conv_taps: slots that a convolution around each sublayer spans, as in DFlash 2: 2; 0 for none.
    conv_group: channels that share what a convolution reads of its input; divides hidden_size.
    anchors: blocks per row that a training step samples. The accepted length it logs counts each of them once.
    decay: the loss of the draft at depth j has weight decay^j; published: e^(−1/4) for blocks of 8, e^(−1/7) for 16.
    draft_depth: the default tree's depth.

    With a draft vocabulary the head keeps the base's output rows of its tokens, frozen.
    """

    kind: ClassVar[str] = "parallel"

    loss: str = "kl"
    draft_vocab_size: int | None = None
    taps: tuple[int, ...] | None = None
    num_layers: int = 2
    block_size: int = 8
    sample_from_anchor: bool = True
    causal: bool = True
    causal_windows: bool | None = None
    conv_taps: int = 0
    conv_group: int = 16
    anchors: int = 512
    decay: float = 0.78
    draft_depth: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)
        if not self.num_drafted:
            raise ValueError("a block of one slot, the root's, drafts nothing where sample_from_anchor is false")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"parallel head options sliding_window={self.sliding_window} and block_size={self.block_size}: slots "
                "of a block see one another, so a window must hold a block"
            )
        if self.causal_windows is not None and self.sliding_window is None:
            raise ValueError("parallel head option causal_windows is of layers with a window: give sliding_window too")
        if self.conv_taps > self.block_size:
            raise ValueError(f"conv_taps={self.conv_taps} spans more than a block of {self.block_size} slots")
        if self.conv_taps and self.hidden_size and self.hidden_size % self.conv_group:
            raise ValueError(f"conv_group={self.conv_group} must divide hidden_size={self.hidden_size}")

    def decoder_block(self) -> ContextBlock:
        if not self.conv_taps:
            return ContextBlock(**self.block_sizes())
        convolution = {"block_size": self.block_size, "taps": self.conv_taps, "group": self.conv_group}
        return ConvolvedBlock(**convolution, **self.block_sizes())

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
    def causal_layers(self) -> tuple[bool, ...]:
        """By layer, whether slots attend only to earlier ones."""
        near = self.causal if self.causal_windows is None else self.causal_windows
        return tuple(near if reach.kind == "sliding" else self.causal for reach in self.reaches)

    @property
    def silent_slots(self) -> int:
        """Slots at the start of a block that draft nothing: the root's, if slots predict their own position."""
        return 0 if self.sample_from_anchor else 1

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        defaults, size = super().base_defaults(base_config), base_config.vocab_size
        check_mask_token(self.mask_token_id, size)
        return {**defaults, "taps": self.default_taps(layer_count(base_config)), "draft_vocab_size": size}

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """Five layers, evenly spaced from the second's output to the third last's."""
        first, last = (2, num_layers - 2) if num_layers > 5 else (min(1, num_layers), num_layers)
        return tuple(sorted({round(first + i * (last - first) / 4) for i in range(5)}))


class ParallelHead(BlockLogits):
    Config = ParallelConfig
    config: ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        c = config
        assert c.hidden_size and c.vocab_size and c.draft_vocab_size and c.taps
        size = c.hidden_size
        self.fc = nn.Linear(len(c.taps) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=c.rms_norm_eps)
        self.decoder = nn.ModuleList(c.decoder_block() for _ in range(c.num_layers))
        self.norm = RMSNorm(size, eps=c.rms_norm_eps)
        self.rotary = c.rotary()
        if c.masks_by_own:
            self.mask_embed = nn.Embedding(1, size)  # a module, because ZeRO-3 gathers its weight when it is called
            nn.init.normal_(self.mask_embed.weight, std=0.02)
        self.add_outputs()

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
        soften(self.norm, base)

    def set_draft_vocabulary(self, counts: Tensor, base: Any = None) -> None:
        if base is None and self.narrow:
            raise ValueError(
                "a parallel head drafts through the base's output rows: give the base with the token counts"
            )
        super().set_draft_vocabulary(counts, base)

    # Inputs and outputs of a block

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped features (B, T, F) → the context (B, T, H)."""
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    def slots(self, tokens: Tensor, count: int, embed: Embed) -> Tensor:
        """Roots (B, A) → inputs of the first `count` slots of their blocks (B, A · count, H)."""
        mask_id: Any = self.config.mask_token_id
        # new_full, because new_tensor would copy from the host and wait.
        own = self.config.masks_by_own
        mask = self.mask_embed(tokens.new_zeros(1)) if own else embed(tokens.new_full((1,), mask_id))
        root = embed(tokens).to(self.dtype).unsqueeze(2)
        return torch.cat([root, mask.to(self.dtype).expand(*tokens.shape, count - 1, -1)], 2).flatten(1, 2)

    def forward(self, x: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Slots (B, M, H), positions to rotate by → their outputs (B, M, H). attend(layer, queries, keys, values): of
        the slots → attention output."""
        rotary = self.rotary(position)
        for i, layer in enumerate(self.decoder):
            x = self.maybe_checkpoint(layer, x, rotary, partial(attend, i))
        return self.norm(x)

    # Training

    def outputs(self, batch: TapBatch, blocks: AnchoredBlocks) -> Tensor:
        """(B, A, D, H) outputs of the slots that draft. A block sees itself, and the positions before its anchor in the
        same document."""
        size, context = self.config.block_size, self.fuse(batch.features)
        self.rotary.ensure(int(batch.position_ids.max()) + size, context)
        rotary = self.rotary(self.rotary.place(batch.position_ids, batch.base_positions))
        context_keys_values = [layer.keys_values(context, rotary) for layer in self.decoder]  # type: ignore[operator]
        slot = torch.arange(size, device=context.device)
        inside = torch.ones(size, size, dtype=torch.bool, device=context.device)
        outputs = []
        at_once = SLOTS_AT_ONCE.get(context.device.type, SLOTS_AT_ONCE["cpu"])
        parts = list(blocks.anchors.split(max(1, at_once // size), 1))
        parts += [blocks.anchors[:, :0]] * (calls_of_all(len(parts), context.device) - len(parts))
        for anchors in parts:
            number = anchors.shape[1]
            position = (batch.position_ids.gather(1, anchors).unsqueeze(2) + slot).flatten(1)
            # A block reads the features of the positions before its anchor.
            column, ahead = (anchors - 1).clamp_min(0).repeat_interleave(size, 1), slot.repeat(number) + 1

            def attend(i: int, q: Tensor, k: Tensor, v: Tensor, column: Tensor = column, ahead: Any = ahead) -> Tensor:
                keys, values = context_keys_values[i]
                mask = RowMask(batch.documents, batch.position_ids, self.config.reaches[i], column, ahead)
                block = inside.tril() if self.config.causal_layers[i] else inside
                own = block.repeat(len(ahead) // size, 1).unsqueeze(0)
                return row_attention(q, (keys, k), (values, v), mask, shared=size, own_mask=own)

            x = self.slots(batch.tokens.gather(1, anchors), size, batch.embed)
            place = self.rotary.place(position, batch.base_positions)
            outputs.append(self(x, place, attend).unflatten(1, (number, size))[:, :, self.config.silent_slots :])
        return torch.cat(outputs, 1)

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        sample = (config.anchors, batch.keys()) if self.training else ()
        blocks = AnchoredBlocks.sample(batch.supervised, batch.documents, config.num_drafted, *sample)
        targets = blocks.targets(batch.tokens, tokens_left(batch.supervised, batch.documents))
        column = blocks.anchors.unsqueeze(2) + torch.arange(config.num_drafted, device=batch.tokens.device)
        column = column.clamp_max(batch.tokens.shape[1] - 1).flatten(1)
        before = self.read_before(batch.tokens.gather(1, column).view(blocks.learned.shape), batch.embed)
        outputs = self.outputs(batch, blocks)
        rows = self.rows(outputs, before, blocks.learned)
        weights = tuple(config.decay**j for j in range(config.num_drafted))
        share = base_share(batch.progress) if config.markov_rank and config.markov_type == "domino" else 0.0
        scores = self.score(
            batch, targets, [rows], weights, overlaps=config.confidence,
            project=lambda rows, depth: self.drafts(rows, batch.lm_head, share),
        )  # fmt: skip
        total, terms = scores.total / batch.denominator, scores.terms(batch.denominator)
        if config.chooses:
            terms["selector"] = scores.choices.detach() / batch.denominator
        if config.confidence:
            assert scores.alphas is not None
            sure = self.confidence_logits(outputs[blocks.learned], before[blocks.learned])
            sure = at_least_float32(sure).unsqueeze(1)
            loss = F.binary_cross_entropy_with_logits(sure, scores.alphas.to(sure.dtype), reduction="none")
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
            rotary = self.rotary(self.rotary.place(position, context.target.base_positions))
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
        count = plan.depth + config.silent_slots if all(config.causal_layers) else config.block_size
        cache = self.read_context(context, max(max(plan.depth + 1, plan.drafting_slots) + config.silent_slots, count))
        if plan.depth == 0:
            return DraftTree.root_only(context.root)
        cache.open(count)
        slot = torch.arange(count, device=cache.lengths.device).expand(len(cache.lengths), -1)
        inside = torch.ones(len(slot), count, count, dtype=torch.bool, device=slot.device)
        forms, masks = list(zip(config.reaches, config.causal_layers, strict=True)), {}
        for reach, causal in dict.fromkeys(forms):
            block = inside.tril() if causal else inside
            masks[reach, causal] = additive(visible(block, slot, cache.lengths, cache.attended, reach), self.dtype)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return grouped_attention(q, *cache.update(k, v, i), masks[forms[i]])

        x = self.slots(context.root.unsqueeze(1), count, target.embed)
        place = self.rotary.place(cache.lengths.unsqueeze(1) + slot, target.base_positions)
        hidden = self(x, place, attend)[:, config.silent_slots :]
        assert config.vocab_size is not None
        expand = self.expander(hidden, target.lm_head, target.embed)
        return plan.grow(context.root, expand, sampler, config.vocab_size)
