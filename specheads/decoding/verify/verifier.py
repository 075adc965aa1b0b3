"""The verifier protocol: all that decoding uses of a target.

Shapes: B batch rows, R of them refilled, T prompt columns, N tree nodes, P = depth of the tree + 1, V vocabulary,
H hidden size, F = tapped layers × hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.hf_base import UnsupportedModel
from specheads.decoding.verify.model_inputs import BasePositions, ModelInputs
from specheads.decoding.verify.rope_switch import RopeSwitch


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """logits (B, N, V); features (B, N, F), the tapped layers concatenated in the order asked for."""

    logits: Tensor
    features: Tensor


class Verifier(Protocol):
    """A target as the verifier of draft trees: `Target`, `Seq2SeqTarget`, `RecordedTarget` or your own.

    The loop and drafters use nothing of it but what is here; compiled steps need a `Target`. `name`, `vocab_size`,
    `prefill`, `verify` and `commit` are required. Subclasses inherit defaults for the rest.

    name: for messages. vocab_size: V.
    limit: the most tokens of any text, set by `prefill` and `refill`. capacity: slots that a drafter's cache for the
      same texts needs.
    static: the shapes of passes repeat, as compiled steps need.
    is_encoder_decoder: each row has a source besides its text. source_ids: these sources, unpadded, on the host; None
      if there are none or they are unknown.
    has_state: recurrent layers carry a state from token to token.
    active (B,): the rows whose outputs matter, None for all. The loop sets it before each step.
    switch: set by `prefill` if positions depend on the length of the texts, else None.
    modules: those its passes run, whose products may be our own (kernels/).
    kept (B,): set by `prefill` if it read only what follows so many tokens of each prompt, whose features it does not
      give; else None.
    base_positions: set by `prefill` for prompts whose positions have several parts, else None.
    """

    name: str
    limit: int = 0
    static: bool = False
    is_encoder_decoder: bool = False
    source_ids: list[list[int]] | None = None
    has_state: bool = False
    active: Tensor | None = None
    switch: RopeSwitch | None = None
    modules: tuple[nn.Module, ...] = ()
    kept: Tensor | None = None
    base_positions: BasePositions | None = None

    @property
    def vocab_size(self) -> int: ...
    @property
    def capacity(self) -> int:
        return self.limit

    def prefill(
        self, ids: Tensor, lengths: Tensor, *, room: int | Sequence[int], inputs: ModelInputs | None = None
    ) -> TargetOutput:
        """Commit prompts ids (B, T), packed left, of lengths (B,). room: how many more tokens will follow, one number
        or one a row.

        inputs: what the model takes besides ids. Returns the logits after each row's last token, (B, 1, V), and
        features (B, T, F), those of the tokens it read, packed left.
        """
        ...

    def prepare(self, bound: int) -> None:
        """Make room for a step, on the host. bound: no row has more committed tokens."""
        return

    def verify(self, tree: DraftTree) -> TargetOutput:
        """One pass over all nodes of the tree: logits (B, N, V), features (B, N, F)."""
        ...

    def commit(self, path: Tensor, length: Tensor) -> None:
        """Add the first length (B,) nodes of path (B, P) to the committed text, and drop the rest of the tree."""
        ...

    def refill(self, rows: Tensor, ids: Tensor, lengths: Tensor, *, room: Sequence[int]) -> TargetOutput:
        """Replace rows (R,) by new prompts ids (R, T) of lengths (R,); arguments and result as in `prefill`.

        Positions must not depend on the length of the texts (`switch`), and prompts must be ids alone.
        """
        raise UnsupportedModel(f"{self.name} takes no new prompts in the rows of finished ones")

    def reread(self, rows: list[list[int]]) -> None:
        """Recompute the committed texts of all rows, when the `switch` says so."""
        return

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (…) → their input embeddings (…, H), for drafters with `layers`."""
        raise UnsupportedModel(f"{self.name} has no embeddings to draft from")

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Last hidden states (…, H) → logits (…, V), for drafters with `layers`."""
        raise UnsupportedModel(f"{self.name} has no language-model head to draft with")
