"""EAGLE-3: three tapped layers, a decoder block trained on its own outputs, a draft vocabulary. arXiv:2503.01840."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specheads.decoding.verify.hf_base import layer_count
from specheads.heads.base import TapBatch
from specheads.heads.layers.block import DecoderBlock, RMSNorm, copy_norm, final_norm, soften
from specheads.heads.layers.latent import LatentBlock, LatentSizes
from specheads.heads.layers.rope import SHARE
from specheads.heads.unrolled import FeatureConfig, FeatureHead
from specheads.heads.vocabulary import DraftVocabulary, check_draft_vocabulary, check_mask_token

USUAL_DRAFT_VOCABULARY = 32_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Eagle3Config(FeatureConfig):
    """draft_vocab_size: tokens the head can draft (default: the base's vocabulary, at most 32,000).
    steps: how many training-time test unrolls. step_decay: the loss of step s has weight step_decay^s.

    norm_features: a norm on each tapped layer before they are fused. norm_before_fc: one norm on their concatenation.
    norm_before_residual: the block adds to the normed hidden state. False, as published: to the hidden state itself,
      beside which its output is negligible if the base's residual stream is large (docs/training-reference.md).
    norm_output: the next step reads the output after the final norm.
    norm_features and norm_output are EAGLE-3.1.
    own_embeddings: the head has and trains token embeddings of its own, which start as the base's.
    mask_token_id: every depth after the first reads this token's embedding and a trained vector, in place of the token
      drafted before and the output there, so one pass drafts all depths: P-EAGLE, arXiv:2602.01469. None: EAGLE-3.
    kv_lora_rank: its blocks have latent attention (MLA), as heads of Kimi-K2.5 and DeepSeek-V3, with keys and values
      made from this many numbers a position. Then head_dim is the size of a query or key, of which qk_rope_head_dim
      are rotated, v_head_dim that of a value, and queries are made from q_lora_rank numbers, if it is given.
    """

    kind: ClassVar[str] = "eagle3"
    title: ClassVar[str] = "EAGLE-3"
    unrecorded: ClassVar[dict[str, Any]] = {"norm_before_residual": False}

    draft_vocab_size: int | None = None
    steps: int = 7
    step_decay: float = 0.8
    norm_features: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = True
    norm_output: bool = False
    own_embeddings: bool = False
    mask_token_id: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_latent()
        check_draft_vocabulary(self.draft_vocab_size, self.vocab_size)
        if self.norm_features and self.norm_before_fc:
            raise ValueError("eagle3 head options norm_features and norm_before_fc: give one of them, not both")

    def _check_latent(self) -> None:
        said, rank, rotated, values = "eagle3 head option", self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim
        if rank is None:
            if given := [name for name in ("q_lora_rank", "qk_rope_head_dim", "v_head_dim") if getattr(self, name)]:
                raise ValueError(f"{said} {given[0]} is of latent attention: give kv_lora_rank too, or leave it out")
            return
        if not (rotated and values and self.head_dim):
            raise ValueError(f"{said} kv_lora_rank={rank} needs head_dim, qk_rope_head_dim and v_head_dim too")
        if rotated % 2 or rotated >= self.head_dim or values > self.head_dim:
            raise ValueError(
                f"{said}s qk_rope_head_dim={rotated}, v_head_dim={values}: with head_dim={self.head_dim} the first "
                "must be even and smaller, and the second at most as large"
            )
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"{said} num_key_value_heads: with kv_lora_rank each attention head has its own, so leave it out"
            )
        if other := [name for name in ("attention_bias", "qk_norm") if getattr(self, name)]:
            raise ValueError(f"{said} {other[0]}: blocks with kv_lora_rank have none")
        if (self.rope_parameters or {}).get(SHARE, 1) != 1:
            raise ValueError(f"{said} rope_parameters: with kv_lora_rank, qk_rope_head_dim says which part is rotated")

    @property
    def output_size(self) -> int | None:
        return self.draft_vocab_size or self.vocab_size

    def block(self, input_size: int) -> DecoderBlock:
        if self.kv_lora_rank is None:
            return super().block(input_size)
        assert self.qk_rope_head_dim and self.v_head_dim and self.rope_parameters
        latent = LatentSizes(self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim)
        return LatentBlock(latent=latent, rope=self.rope_parameters, input_size=input_size, **self.block_sizes())

    @property
    def rotated_size(self) -> int | None:
        return self.qk_rope_head_dim or self.head_dim

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        taps = (2, num_layers // 2, num_layers - 3)
        if sorted(set(taps)) != list(taps) or taps[0] > num_layers:
            # Too few layers for the published choice: the first, a middle and the last.
            taps = (min(1, num_layers), (num_layers + 1) // 2, num_layers)
        return taps

    def base_defaults(self, base_config: Any) -> dict[str, Any]:
        defaults = super().base_defaults(base_config)
        check_mask_token(self.mask_token_id, base_config.vocab_size)
        taps: tuple[int, ...] = defaults["taps"]
        if self.taps is None and len(set(taps)) < len(taps):
            _log.warning(
                "%s: a base of %d layers has too few for %d taps: the head reads layers %s, some more than once",
                self.kind, layer_count(base_config), len(taps), ", ".join(map(str, taps)),
            )  # fmt: skip
        if self.kv_lora_rank is not None:
            defaults["num_key_value_heads"] = defaults["num_attention_heads"]
        return {**defaults, "draft_vocab_size": min(base_config.vocab_size, USUAL_DRAFT_VOCABULARY)}


class Eagle3Head(FeatureHead, DraftVocabulary):
    Config = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        assert config.hidden_size and config.vocab_size and config.draft_vocab_size and config.taps
        super().__init__(config, input_size=2 * config.hidden_size)
        size, taps = config.hidden_size, len(config.taps)
        self.fc_norm: nn.ModuleList | None = None
        self.input_norm: RMSNorm | None = None
        if config.norm_features:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps=config.rms_norm_eps) for _ in range(taps))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(taps * size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Embedding(1, taps * size)  # a module, because ZeRO-3 gathers its weight when called

    def output_layers(self) -> list[nn.Linear]:
        return [self.lm_head]

    def initialise(self, base: Any) -> None:
        """Copy the base's lm_head and final norm, softened. The rest starts at random, as published: starting the block
        from the base's last layer, or fc as the identity on the highest tap, learns more slowly (docs/LOG.md)."""
        self.copy_output_rows(base)
        copy_norm(self.norm, final_norm(base))
        soften(self.norm, base)
        if self.embed_tokens is not None:
            rows, source = self.embed_tokens.weight, base.get_input_embeddings()
            if not source.weight.is_meta:
                with torch.no_grad():
                    rows.copy_(source(torch.arange(len(rows), device=source.weight.device)))

    def fuse(self, features: Tensor) -> Tensor:
        if self.fc_norm is not None:
            taps = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return self.fc(features)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        return x, normed if self.config.norm_before_residual else hidden

    def next_hidden(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.config.norm_output else output

    def masked_input(self, tokens: Tensor, base_embed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:
        if (mask := self.config.mask_token_id) is None:
            return None
        token = tokens.new_full((1, 1), mask)  # new_tensor would copy from the host and wait
        return self.embed(token, base_embed), self.fuse(self.mask_hidden(token.new_zeros(1, 1)).to(self.dtype))

    def draft_logits(self, hidden: Tensor, depth: int = 0, lm_head: Any = None) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def output_parameters(self) -> list[Tensor]:
        return [self.norm.weight, self.lm_head.weight]

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        targets, rows = self.drafts(batch, config.steps)
        scores = self.score(batch, targets, rows, tuple(config.step_decay**s for s in range(config.steps)))
        return scores.total / batch.denominator, scores.terms(batch.denominator)
