"""Options of the parallel block head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from specheads.heads.feature import FeatureHeadConfig
from specheads.heads.limits import DEEPEST
from specheads.heads.vocabulary import DraftVocabularyConfig


@dataclass(frozen=True)
class ParallelConfig(FeatureHeadConfig, DraftVocabularyConfig):
    """block_size: slots of a block, the root's included.
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
    aliases: ClassVar[dict[str, str]] = {}
    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        "block_size": (1, DEEPEST), "anchors": (1, 2**20), "markov_rank": (0, 2**16), "mask_token_id": (0, 2**24),
    }  # fmt: skip

    loss: str = "kl"
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
        if not 0 < self.decay <= 1:
            raise ValueError(f"parallel head option decay={self.decay} must be above 0 and at most 1")
        if not self.num_drafted:
            raise ValueError("a block of one slot, the root's, drafts nothing where sample_from_anchor is false")

    @property
    def max_depth(self) -> int:
        return self.num_drafted

    @property
    def served_depth(self) -> int:
        return self.num_drafted  # the whole block; this library drafts only its first draft_depth tokens

    @property
    def num_drafted(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - self.silent_slots

    @property
    def silent_slots(self) -> int:
        """Slots at the start of a block that draft nothing: the root's, if slots predict their own position."""
        return 0 if self.sample_from_anchor else 1

    def with_base_defaults(self, base_config: Any) -> ParallelConfig:
        config = super().with_base_defaults(base_config)
        assert config.vocab_size is not None
        if config.mask_token_id is not None and config.mask_token_id >= config.vocab_size:
            raise ValueError(f"mask_token_id={config.mask_token_id} is no token of a vocabulary of {config.vocab_size}")
        return config

    @classmethod
    def default_taps(cls, num_layers: int) -> tuple[int, ...]:
        """Five layers, evenly spaced from the second's output to the third last's."""
        first, last = (2, num_layers - 2) if num_layers > 5 else (min(1, num_layers), num_layers)
        return tuple(sorted({round(first + i * (last - first) / 4) for i in range(5)}))
