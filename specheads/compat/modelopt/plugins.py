"""The models that convert() returns, with ModelOpt's way of labelling batches and its names for model parts.

Shapes: B batch rows, T positions, S drafted tokens, Vd draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.compat.modelopt.acceptance import HFARValidation
from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import chain
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.verify.causal import Target
from specheads.heads import HeadConfig
from specheads.heads.vocabulary import DraftVocabulary, draft_offsets
from specheads.models.spec_model import SpecModel

__all__ = ["HFARValidation", "HFEagleModel", "HFMedusaModel", "HFModel"]


class HFModel(SpecModel):
    """A SpecModel that also accepts the batches of ModelOpt's examples, and exposes the modules of its base."""

    def __getattr__(self, name: str) -> Any:
        """Finds the base's own modules (`model.model`, `model.lm_head`) where they were before convert()."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            parts = self.__dict__.get("_modules", {}).get("base")
            if parts is None or name not in parts._modules:
                raise
            return parts._modules[name]

    def select_supervised(
        self, input_ids: Tensor, labels: Tensor | None, loss_mask: Tensor | None, attention_mask: Tensor | None,
        num_items: Tensor | float | None,
    ) -> tuple[Tensor, Tensor | float | None]:  # fmt: skip
        """As in SpecModel, but labels may be shifted and come with a loss_mask: see supervised()."""
        if labels is None:
            return super().select_supervised(input_ids, labels, loss_mask, attention_mask, num_items)
        mask = supervised(input_ids, labels, loss_mask, attention_mask)
        if num_items is not None:  # it counts all labels, including those of padding
            share = mask.sum() / (labels != -100).sum().clamp_min(1)
            num_items = torch.as_tensor(num_items, device=share.device) * share
        return mask, num_items

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        return of_kind(super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs))

    @torch.no_grad()
    def pseudo_speculative_generate(self, input_ids: Tensor, steps: int = 1) -> tuple[Tensor, Tensor | None]:
        """The base's greedy next token (B, 1) after input_ids (B, T), and the greedy draft (B, S) after that token.

        steps: S; with 0 the draft is None. ValueError if the head cannot draft a chain of that length.
        """
        lengths = torch.full((len(input_ids),), input_ids.shape[1], device=input_ids.device)
        target = Target(self.base, layers=self.head.layers, scratch=steps + 1)
        out = target.prefill(input_ids, lengths, room=steps + 1)
        root = out.logits[:, 0].argmax(-1)
        if steps < 1:
            return root.unsqueeze(1), None
        context = Context.start(target, input_ids, lengths, out.features, root)
        tree = self.head.propose(context, Sampler(), chain(steps))
        return root.unsqueeze(1), tree.tokens[:, 1:]


class HFMedusaModel(HFModel):
    @property
    def medusa_heads(self) -> Any:
        return self.head


class HFEagleModel(HFModel):
    @property
    def eagle_config(self) -> HeadConfig:
        return self.head.config

    @property
    def eagle_module(self) -> EagleModule:
        return EagleModule(self)

    @staticmethod
    def load_draft_vocab_cache(model: HFEagleModel, d2t_path: str | Path | None) -> None:
        """Set the drafted tokens from a d2t file, if the draft vocabulary is smaller than the base's."""
        head = model.head
        if not isinstance(head, DraftVocabulary) or not head.narrow:
            return
        if d2t_path is None or not Path(d2t_path).is_file():
            raise FileNotFoundError(
                f"draft_vocab_size={len(head.d2t)} of {len(head.t2d)} needs the file of its tokens; there is no "
                f"{d2t_path}"
            )
        model.eagle_module.d2t = torch.load(d2t_path, map_location=head.d2t.device, weights_only=True)


class EagleModule:
    """A model's head as ModelOpt's scripts access it: setting d2t (Vd,) chooses the tokens that it can draft."""

    def __init__(self, model: HFEagleModel) -> None:
        vars(self)["model"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["model"].head, name)

    def __setattr__(self, name: str, value: Any) -> None:
        head = vars(self)["model"].head
        if name != "d2t":
            setattr(head, name, value)
            return
        if not isinstance(head, DraftVocabulary) or value.shape != head.d2t.shape:
            size = len(head.d2t) if isinstance(head, DraftVocabulary) else 0
            raise ValueError(f"d2t has shape {tuple(value.shape)}, and the head drafts {size} tokens of its own")
        ids = value.to("cpu", torch.long) + torch.arange(len(value))
        d2t, t2d = draft_offsets(ids, len(head.t2d))
        head.d2t.copy_(d2t)
        head.t2d.copy_(t2d)
        head.copy_output_rows(vars(self)["model"].base)


def of_kind(model: SpecModel) -> SpecModel:
    """The same object, its class changed to the one with ModelOpt's names for its kind of head."""
    kind = model.head.config.kind
    model.__class__ = {"medusa": HFMedusaModel, "eagle": HFEagleModel, "eagle3": HFEagleModel}.get(kind, HFModel)
    return model


def supervised(
    input_ids: Tensor, labels: Tensor, loss_mask: Tensor | None = None, attention_mask: Tensor | None = None
) -> Tensor:
    """(B, T) bool, true where the token at that index is supervised.

    labels (B, T), −100 where unsupervised. ModelOpt's examples shift them (entry t is token t + 1), Hugging Face does
    not; comparison with input_ids tells which. loss_mask (B, T), shifted like labels, says which of them count.
    ValueError if labels differ from the tokens of input_ids.
    """
    real = labels != -100
    if attention_mask is not None:
        real = real & attention_mask.bool()
    chosen = real if loss_mask is None else loss_mask.bool() & real
    following = torch.cat([input_ids[:, 1:], torch.full_like(input_ids[:, :1], -1)], 1)
    if not bool(((labels != following) & chosen).any()):
        return torch.cat([torch.zeros_like(chosen[:, :1]), chosen[:, :-1]], 1)
    if not bool(((labels != input_ids) & chosen).any()):
        return chosen
    raise ValueError(
        "labels are neither the tokens of input_ids, as Hugging Face has them, nor those shifted left by one, as "
        "ModelOpt's examples have them"
    )
