"""Reads a foreign checkpoint as a head. Its format is recognised from the files and logged in one line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging
from transformers.utils.hub import extract_commit_hash

from specheads.heads import HeadConfig
from specheads.models.config import SpecConfig
from specheads.models.files import CONFIG, CheckpointError
from specheads.models.formats import FORMATS
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format, head_config, read
from specheads.models.formats.keys.config_table import architectures

logger = hf_logging.get_logger(__name__)
_NAMED = ("medusa_", "hydra_")  # prefixes of weights files that name the kind of head


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A foreign checkpoint and its format."""

    form: Format
    files: Files

    @property
    def base_name(self) -> str | None:
        """The name of the base given in the checkpoint, if any."""
        return self.form.base_of(self.files)

    @cached_property
    def part(self) -> Files:
        """The files restricted to the head's tensors."""
        return self.form.part_of(self.files)

    @property
    def within_base(self) -> bool:
        """Is the head part of its base's own checkpoint?"""
        return self.form.within_base

    @property
    def base_location(self) -> dict[str, Any]:
        """If this is the base's own checkpoint on the hub: its revision (the commit of these files) and subfolder."""
        if not self.within_base or self.base_name != str(self.files.source) or self.files.folder is not None:
            return {}
        commit = extract_commit_hash(str(self.files.find(CONFIG)), None)
        known = {"revision": commit, "subfolder": self.files.hub.get("subfolder")}
        return {name: value for name, value in known.items() if value is not None}

    def refusal(self) -> str | None:
        """Why no head here can hold the modules in a base's own checkpoint, judged by its files alone; None if there is
        no reason."""
        if self.within_base:
            try:
                self.part.shapes  # noqa: B018 (reads them)
            except CheckpointError as error:
                return str(error)
        return None

    def head_config(self, base: PreTrainedModel) -> HeadConfig:
        """The config of the head for this base. No weight of the base is read, so it may be on the meta device."""
        return head_config(self.form, self.part, base)

    def read(self, base: PreTrainedModel, allow_nonfinite: bool = False) -> tuple[HeadConfig, dict[str, Tensor]]:
        """The head's config for this base, and its tensors by our names. CheckpointError if the files are wrong or no
        head here fits them."""
        config, tensors = read(self.form, self.part, base, allow_nonfinite)
        dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
        logger.warning("%s holds %s: read as a head of kind %s, in %s", self.files, self.form.title, config.kind, dtype)
        return config, tensors


def find_foreign(
    source: Any, hub: dict[str, Any] | None = None, allow_pickle: bool = False
) -> ForeignCheckpoint | None:
    """The foreign checkpoint at `source`; None if it is one of ours, a base model, or nothing at all.

    source: also its Files. CheckpointError for damaged files. A pickle is recognised; without allow_pickle, reading its
    tensors is refused.
    """
    files = source if isinstance(source, Files) else Files(source, hub, allow_pickle)
    config = files.config
    if config.get("model_type") == SpecConfig.model_type or files.weights is None:
        return None
    if not config and not files.weights.name.startswith(_NAMED):
        return None  # reading it as one of ours then reports the missing or garbled config
    if files.pickled and not files.allow_pickle and not _may_be_a_head(files, config):
        return None
    form = next((form for form in FORMATS if form.recognises(files)), None)
    return None if form is None else ForeignCheckpoint(form, files)


def _may_be_a_head(files: Files, config: dict[str, Any]) -> bool:
    """Could this be a head, judged by its config and file names alone?"""
    assert files.weights is not None
    keys = {key for form in FORMATS for key in form.config_keys}
    return bool(
        keys & config.keys() or files.weights.name.startswith(_NAMED) or config.get("num_hidden_layers") == 1
        or config.get("model_type") == "medusa" or any("Eagle" in arch for arch in architectures(config))
    )  # fmt: skip
