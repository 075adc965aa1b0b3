"""HeadUpdater: trains a head beside a base that is being trained itself, on what the base's own forward computed.

Shapes: B batch rows, T positions, H hidden, V vocabulary, F tapped features, R rows of a sample, W its positions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specheads.data.batches import IGNORED, documents_of, positions_of
from specheads.decoding.verify.hf_base import logits_of, text_config, unwrapped
from specheads.decoding.verify.taps import layer_count
from specheads.heads import DraftHead, TapBatch
from specheads.losses.teacher import LiveTeacher, gives_logits
from specheads.options import require_count, shown

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """Parts of some rows of a batch, copied without gradients and padded on the right.

    tokens, documents, positions, supervised (R, W): as in `TapBatch`. features (R, W, F). outputs: the base's logits
    (R, W, V), or its last hidden states (R, W, H) if `from_hidden`.
    """

    tokens: Tensor
    documents: Tensor
    positions: Tensor
    supervised: Tensor
    features: Tensor
    outputs: Tensor
    from_hidden: bool


class HeadUpdater:
    """Trains a head, one bounded step at a time, while its base is trained by someone else.

    every: one call in this many trains. max_tokens: the most positions R × W of such a step, padding included; longer
    rows are cut, and of many rows some are drawn. learning_rate, weight_decay: of the head's own AdamW, whose states
    and weights are float32 even if the head is not. max_grad_norm: the head's gradient is clipped to it.
    seed: of what is drawn.

    Neither weights nor gradients of the base are changed. ValueError for options out of range.
    """

    def __init__(
        self, head: DraftHead, base: PreTrainedModel, *, every: int = 4, max_tokens: int = 2048,
        learning_rate: float = 1e-4, weight_decay: float = 0.0, max_grad_norm: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        for name, value in (("every", every), ("max_tokens", max_tokens)):
            require_count(name, value)
        if every < 1 or max_tokens < 16:
            raise ValueError(
                f"every={every} must be at least 1 call, and max_tokens={max_tokens} at least 16 positions"
            )
        if not (learning_rate > 0 and max_grad_norm > 0):
            raise ValueError(f"learning_rate={learning_rate} and max_grad_norm={max_grad_norm} must be above 0")
        self.head, self.base = head, unwrapped(base)
        self.every, self.max_tokens, self.max_grad_norm, self.seed = every, max_tokens, max_grad_norm, seed
        self.calls = self.updates = 0
        self._parameters = {name: p for name, p in head.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError(f"no parameter of this {head.config.kind} head requires gradients: nothing can learn")
        # What the optimizer changes: in bfloat16 most steps of a small rate would round to nothing.
        self.weights = {
            name: p if p.dtype == torch.float32 else p.detach().float() for name, p in self._parameters.items()
        }
        self.optimizer = torch.optim.AdamW(
            list(self.weights.values()), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay
        )

    @property
    def due(self) -> bool:
        """Will the next call train?"""
        return self.calls % self.every == 0

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states that a step without logits reads: the head's, and the last after the final norm."""
        return tuple(sorted({*self.head.layers, layer_count(text_config(self.base))}))

    def step(
        self,
        hidden_states: Mapping[int, Tensor] | Sequence[Tensor] | Tensor,
        logits: Tensor | None,
        ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> float | None:
        """One training step on a forward pass of the base, before the base's weights change → its loss, or None if this
        call does not train (see `due`) or has nothing to learn.

        hidden_states: as the base returns them with output_hidden_states=True, each (B, T, H), of which only those of
        `taps` are read; or the head's tapped layers concatenated (B, T, F). logits (B, T, V): the base's own; None to
        compute those needed from its last hidden state. ids (B, T). attention_mask (B, T): 0 at padding, on either
        side. labels (B, T): −100 where token t is not learnt (before any shift); None: all are. position_ids: of packed
        rows, in which a document begins wherever they do not increase.
        """
        if not self.due:
            return self.learn(None)
        return self.learn(
            self.sample(
                hidden_states, logits, ids, attention_mask=attention_mask, labels=labels, position_ids=position_ids
            )
        )

    @torch.no_grad()
    def sample(
        self, hidden_states: Any, logits: Tensor | None, ids: Tensor, *, attention_mask: Tensor | None = None,
        labels: Tensor | None = None, position_ids: Tensor | None = None,
    ) -> Sample | None:  # fmt: skip
        """What `learn` needs of a forward pass, at most `max_tokens` positions; None if no token is to be learnt. The
        arguments are those of `step`."""
        features, outputs = self._features(hidden_states, ids), logits
        if outputs is None:
            outputs = self._last_hidden(hidden_states)
        if outputs.shape[:2] != ids.shape:
            raise ValueError(f"outputs of shape {tuple(outputs.shape)} do not belong to ids {tuple(ids.shape)}")
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.long()
        split = None if position_ids is None else documents_of(position_ids, mask)
        documents = mask if split is None else split
        learnt = documents > 0
        if labels is not None:
            learnt = learnt & (labels != IGNORED)
        parts = self._choose(documents.cpu() > 0, learnt.cpu())
        if not parts:
            return None

        def copied(values: Tensor) -> Tensor:
            return pad_sequence([values[row, start:stop] for row, start, stop in parts], batch_first=True)

        return Sample(
            tokens=copied(ids), documents=copied(documents), positions=copied(positions_of(documents)),
            supervised=copied(learnt), features=copied(features), outputs=copied(outputs), from_hidden=logits is None,
        )  # fmt: skip

    def learn(self, sample: Sample | None) -> float | None:
        """One training step on a sample → its loss; None, and no step, without a sample or if the loss is not finite.
        Either way this counts as a call."""
        self.calls += 1
        if sample is None:
            return None
        draw = self.seed % 2**31 << 32 | self.updates % 2**32
        with torch.autocast(sample.tokens.device.type, enabled=False), torch.enable_grad():
            self.head.train()
            self.head.copy_frozen_weights(self.base)  # what it holds of the base as the base is now
            try:
                loss, _ = self.head.loss(self._batch(sample, draw))
                # Not backward(): that would add to the gradients of the base's embeddings and output matrix.
                found = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
            finally:
                self.head.eval()
        value = float(loss.detach())
        if not torch.isfinite(loss):
            _log.warning("the head's loss is %s: this step is left out, and the head stays as it is", value)
            return None
        for weight, gradient in zip(self.weights.values(), found, strict=True):
            weight.grad = None if gradient is None else gradient.to(weight.dtype)
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._write_back()
        self.updates += 1
        return value

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs, to be saved by torch.save: the trained weights in float32, AdamW's states and
        the counts. Tensors are those in use; copy them to keep them."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        counts = {"calls": self.calls, "updates": self.updates}
        return {"weights": weights, "optimizer": self.optimizer.state_dict(), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError, leaving all as it was, for the state of another head."""
        shapes = {name: tuple(weight.shape) for name, weight in state["weights"].items()}
        if shapes != {name: tuple(weight.shape) for name, weight in self.weights.items()}:
            raise ValueError(f"this is the state of another head: it has {shown(', '.join(sorted(shapes)[:4]))} …")
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self._write_back()
        self.calls, self.updates = state["calls"], state["updates"]

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, weight in self.weights.items():
            if weight is not self._parameters[name]:
                self._parameters[name].copy_(weight)

    def _batch(self, sample: Sample, seed: int) -> TapBatch:
        base = self.base

        def project(hidden: Tensor) -> Tensor:
            return logits_of(base, hidden)

        return TapBatch(
            tokens=sample.tokens,
            features=sample.features.to(self.head.dtype),
            teacher=LiveTeacher(sample.outputs.flatten(0, 1), project if sample.from_hidden else None),
            supervised=sample.supervised,
            documents=sample.documents,
            position_ids=sample.positions,
            embed=base.get_input_embeddings(),
            lm_head=project,
            seed=seed,
        )

    def _features(self, hidden_states: Any, ids: Tensor) -> Tensor:
        if isinstance(hidden_states, Tensor):
            return hidden_states
        try:
            found = [hidden_states[k] for k in self.head.layers]
        except (KeyError, IndexError):
            found = [None]
        if any(one is None or one.shape[:2] != ids.shape for one in found):
            raise ValueError(
                f"the head reads hidden states {', '.join(map(str, self.head.layers))} of the tokens in ids; give "
                "all that the base returns with output_hidden_states=True"
            )
        return torch.cat(found, -1) if found else torch.empty(*ids.shape, 0, device=ids.device)

    def _last_hidden(self, hidden_states: Any) -> Tensor:
        last = layer_count(text_config(self.base))
        if isinstance(hidden_states, Tensor) or not gives_logits(self.base):
            raise ValueError("give logits: they do not follow from what was given")
        return hidden_states[last]

    def _choose(self, seen: Tensor, learnt: Tensor) -> list[tuple[int, int, int]]:
        """Row, first and last + 1 column of each part to learn from. seen, learnt (B, T) bool, on the host."""
        generator = torch.Generator().manual_seed(self.seed % 2**31 << 32 | self.calls % 2**32)
        parts: list[tuple[int, int, int]] = []
        widest = 0
        for row in torch.randperm(len(seen), generator=generator).tolist():
            columns, wanted = seen[row].nonzero().flatten(), learnt[row].nonzero().flatten()
            if not len(wanted):
                continue
            first, stop = int(columns[0]), int(columns[-1]) + 1
            width = min(stop - first, self.max_tokens)
            if (len(parts) + 1) * max(widest, width) > self.max_tokens:
                continue  # a later, shorter row may fit
            if width < stop - first:  # a part that begins in what is learnt, or as late as can be
                last = stop - width
                early = min(last, max(first, int(wanted[0]) - 1))
                first = int(torch.randint(early, last + 1, (), generator=generator))
            parts.append((row, first, first + width))
            widest = max(widest, width)
        return parts
