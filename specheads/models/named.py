"""The target of a command, and the drafters for it by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.data import images
from specheads.decoding.drafters import CHECKPOINT_LOADERS, DRAFTERS, Cascade, Drafter, DraftModel
from specheads.decoding.drafters.model import refuse_other_kind
from specheads.decoding.verify.hf_base import text_config
from specheads.heads import DraftHead
from specheads.hub import hub_options
from specheads.models.base.loading import (
    load_language_model,
    load_processing,
    load_tokenizer,
    placement,
    quantization,
    refuse_without_config,
    settle_dtype,
)
from specheads.models.checkpoint import in_dtype
from specheads.models.config import SpecConfig
from specheads.models.convert import load_head
from specheads.models.costs import auto_drafter
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.importing import find_foreign
from specheads.models.formats.keys.other_kinds import other_kind
from specheads.models.saved_head import read
from specheads.models.spec_model import SpecModel
from specheads.options import nearest, shown

logger = hf_logging.get_logger(__name__)
KNOWN = ("auto", "head", "model", *DRAFTERS, "cascade")  # drafters that are no checkpoints


@dataclass
class Models:
    """The target, its tokenizer, and the drafters loaded so far: `head` if MODEL is one, others under the names they
    were requested by. quantize: the target and draft models, see `load_language_model`."""

    target: PreTrainedModel
    tokenizer: Any
    drafters: dict[str, Drafter] = field(default_factory=dict)
    quantize: str | None = None

    @classmethod
    def load(
        cls, source: str, *, base: str | None = None, dtype: str = "auto", device: str = "auto",
        quantize: str | None = None,
    ) -> Models:  # fmt: skip
        """source: a head checkpoint, or a plain Hugging Face model. quantize: the target and draft models, see
        `load_language_model`; heads stay as they are. ValueError, OSError or ImportError with the reason."""
        torch_dtype, torch_device = placement(dtype, device)
        if holds_head(source):
            model, processing = load_with_processing(source, base, dtype, device, quantize)
            return cls(model.base, images.tokenizer_of(processing), {"head": model.head}, quantize)
        if base is not None:
            raise ValueError(f"--base: {source} is a whole model, not a head, so it takes no base")
        options = quantized_options(quantize, torch_device)
        target = load_language_model(source, dtype=torch_dtype or "auto", **options, **hub_options(source))
        if torch_dtype is None:
            settle_dtype(target, torch_device)
        return cls(to_device(target, torch_device), tokenizer_of(source), quantize=quantize)

    def choose(self, draft: str, *, shaped: bool = False) -> tuple[str | None, Drafter | None]:
        """The drafter's name in a table, and the drafter, which `draft` names as for `drafter`; both None for "none".

        "auto" is the head, or else lookup, if `shaped`: a tree or a rule is given, as in generate()."""
        if draft == "none":
            return None, None
        if shaped and draft.partition(":")[0] == "auto":
            draft = "head" if "head" in self.drafters else "lookup"
        drafter = self.drafter(draft)
        return describe_drafter(draft, drafter), drafter

    def names(self) -> list[str]:
        """The names that `drafter` takes, besides paths of models that are not loaded yet."""
        return ["auto", *DRAFTERS, *(name for name in self.drafters if name not in ("auto", *DRAFTERS))]

    def drafter(self, name: str) -> Drafter:
        """A drafter by name, loaded on first use: `auto`, `auto:FILE` (with the costs in a file of `specheads tune`),
        `head`, a text of DRAFTERS such as `ngram:4`, `model:PATH`, `cascade:DRAFTER+DRAFTER…` with the usual k-matrix,
        or the path of a head or of a model. ValueError or OSError if there is none."""
        if name not in self.drafters:
            self.drafters[name] = self._load(name)
        return self.drafters[name]

    def cascade(self, name: str, k_matrix: Any, leniency: float = 1.0, notation: str = "incremental") -> Cascade:
        """`cascade:DRAFTER+DRAFTER…`; the options are those of `Cascade`."""
        drafts = [self.drafter(part) for part in name.removeprefix("cascade:").split("+")]
        return Cascade(drafts, k_matrix, leniency, notation)

    def draft_model(self, source: str) -> DraftModel:
        """A smaller model as drafter. Its vocabulary may differ from the target's, unless it has no tokenizer."""
        options = quantized_options(self.quantize, self.target.device)
        small = load_language_model(source, dtype=self.target.dtype, **options, **hub_options(source))
        refuse_other_kind(small, type(self.target).__name__, self.target.config.is_encoder_decoder)
        small = to_device(small, self.target.device)
        try:
            tokenizer = None if self.tokenizer is None else tokenizer_of(source)
        except (ValueError, OSError):
            tokenizer = None
        if tokenizer is None:
            return DraftModel(small)
        return DraftModel(small, tokenizer=tokenizer, target_tokenizer=self.tokenizer)

    def _load(self, name: str) -> Drafter:
        kind, _, rest = name.partition(":")
        if not name or (kind == "model" and not rest):
            raise ValueError(f"drafter {name!r} lacks a name: give model:PATH, a checkpoint, or {', '.join(KNOWN)}")
        refuse_unknown_name(name, KNOWN, "drafter")
        if name == "head":
            raise ValueError("there is no head to draft with: start with a head checkpoint as MODEL, or name one")
        if kind == "cascade":
            drafts = [self.drafter(part) for part in rest.split("+")]
            return Cascade(drafts, usual_k_matrix(drafts))
        if kind == "auto":
            head = self.drafters.get("head")
            return auto_drafter(self.target, head if isinstance(head, DraftHead) else None, rest or None)
        if kind == "model":
            return self.draft_model(rest)
        if kind in DRAFTERS:
            return DRAFTERS.build(name, vocab_size=text_config(self.target).vocab_size)
        if holds_head(name):
            refuse_adapters(name)
            return load_head(self.target, name, dtype=self.target.dtype).head
        return self.draft_model(name)


_loaded: WeakKeyDictionary[PreTrainedModel, Models] = WeakKeyDictionary()  # by generate()'s draft=, once for a base


def load_drafter(draft: str, base: PreTrainedModel, head: Drafter | None = None) -> Drafter:
    """The drafter of a text that names checkpoints, for generate(). Each is loaded once for a base."""
    if base not in _loaded:
        try:
            tokenizer = tokenizer_of(str(base.name_or_path))
        except (ValueError, OSError):  # a base that was made in memory
            tokenizer = None
        _loaded[base] = Models(base, tokenizer)
    models = _loaded[base]
    if head is not None:
        models.drafters["head"] = head
    return models.drafter(draft)


CHECKPOINT_LOADERS.append(load_drafter)


def usual_k_matrix(drafts: Sequence[Drafter]) -> list[list[int]]:
    """[[5, 8], [0, 8]] for two: a draft writes 5 tokens for each larger one, the smallest 8; a head what it can."""
    tokens = [min(5, draft.fixed_depth or 5) for draft in drafts[:-1]]
    return [[0] * row + tokens[row:] + [8] for row in range(len(drafts))]


def refuse_unknown_name(name: str, known: Sequence[str], what: str) -> None:
    """ValueError or FileNotFoundError for a name, as of a drafter, that is neither in `known`, before its colon, nor a
    checkpoint here or on the hub. what: the kind of name, for the message."""
    if (kind := name.partition(":")[0]) in known:
        return
    if "/" not in name and not Path(name).exists() and (near := nearest(kind, known)):
        raise ValueError(f"unknown {what} {shown(name)}; did you mean {near!r}?")
    try:
        hub_options(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; without a checkpoint: {', '.join(known)}") from error


def holds_head(source: str) -> bool:
    """Is it a head checkpoint, ours or foreign, rather than a whole model? Also True if nothing can be read: loading it
    as a head then says why. False, with the reason logged, for a model whose draft modules cannot become a head."""
    if (foreign := find_foreign(source, hub_options(source))) is not None:
        if (why := foreign.refusal()) is not None:
            logger.warning_once("%s is decoded without the draft modules that it ships: %s", source, why)
        return why is None
    other = other_kind(Files(source, hub_options(source)).config)
    if other is not None and not other.model:
        return True
    refuse_without_config(source)
    try:
        config = AutoConfig.from_pretrained(source, **hub_options(source))
    except OSError:
        return True
    return isinstance(config, SpecConfig)


def refuse_adapters(source: str) -> None:
    """CheckpointError for a head with adapters of its base (Medusa-2), which would change the target."""
    if find_foreign(source, hub_options(source)) is None and read(source, **hub_options(source)).config.joint:
        raise CheckpointError(
            f"{source} was trained together with adapters of its base, which would change the text of the target; "
            "start with it as MODEL, then the adapted base is the target"
        )


def quantized_options(quantize: str | None, device: torch.device) -> dict[str, Any]:
    """Options that load a model quantised, onto the device; {} for None. ValueError for an unknown name, ImportError if
    the library is missing."""
    if quantize is None:
        return {}
    quantization(quantize, torch.float32)  # refuses before a model is read
    return {"quantize": quantize, "device_map": {"": device}}


def to_device(model: Any, device: torch.device) -> PreTrainedModel:
    """The model in eval mode, on the device unless loading has placed it."""
    return (model if getattr(model, "hf_device_map", None) else model.to(device)).eval()


def tokenizer_of(source: str) -> Any:
    return load_tokenizer(source, **hub_options(source))


def describe_drafter(name: str, drafter: Drafter) -> str:
    """`eagle3 head`, `draft model Qwen/Qwen3-0.6B`, `lookup`."""
    if isinstance(drafter, DraftHead):
        return f"{drafter.config.kind} head"
    if isinstance(drafter, DraftModel):
        return f"draft model {drafter.small.name_or_path}"
    return name


def load_with_processing(
    source: str, base: str | None, dtype: str, device: str, quantize: str | None = None
) -> tuple[SpecModel, Any]:
    """Base and head on the device, and the base's processor if it reads images, else its tokenizer. quantize: the
    base. ValueError, OSError or ImportError with the reason."""
    torch_dtype, torch_device = placement(dtype, device)
    options = quantized_options(quantize, torch_device)
    model: Any = SpecModel.from_pretrained(source, base=base, dtype=torch_dtype or "auto", **options)
    if torch_dtype is None:
        settle_dtype(model.base, torch_device)
        in_dtype(model.head, model.base.dtype)
    (model.head if options else model).to(torch_device)
    name = base or model.base.name_or_path
    return model, load_processing(name, model.base.config, **hub_options(name))
