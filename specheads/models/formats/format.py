"""The interface of a foreign format: a table of tensor names and a config translation, in both directions.

A checkpoint is read in three steps, none of which trusts it. `recognises` looks at its config and tensor names.
`options` translates its config into the options of a head. Then every shape and dtype is compared with that head on
the meta device, before any tensor is read. Shapes: V vocabulary, Vd draft vocabulary, H hidden.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.decoding.kernels.int8_linear import applied_weight
from specheads.decoding.verify.hf_base import text_config
from specheads.heads import HEADS, HeadConfig
from specheads.models.files import WEIGHTS, CheckpointError, refuse_nonfinite, widest_dtype
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import ConfigTable, architectures, table
from specheads.models.formats.keys.other_kinds import refuse_unread_kind
from specheads.models.formats.serving import fill_template
from specheads.options import listing, reason, shortened, shown

_MAX_LAYERS = 64  # layers, or heads that predict one depth each


@dataclass(frozen=True)
class ExportFiles:
    """The files of an export: config.json, the tensors and the name of their file, text files, links, and what other
    files hold that torch.save() writes."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = WEIGHTS
    texts: dict[str, str] = field(default_factory=dict)  # by file name
    links: dict[str, Path] = field(default_factory=dict)  # symbolic links to other files, by name
    pickles: dict[str, Any] = field(default_factory=dict)  # by file name


class Format(ABC):
    """One program's format for one kind of head.

    engine: the program's name for `--to`. kind: the kind of head. title: the format's name in messages. versions: the
    program versions it was written for. serving: Markdown template with the commands (serving.py). embeds: whether an
    export includes the base's embeddings; None if the format cannot hold them. Embeddings in a file that is read are
    compared with the base's. weights: the name of the weights file. within_base: the head is part of
    its base's own checkpoint. config_keys: config keys that no complete model has. They identify a pickle as a head,
    since its tensors are not inspected. classes: a pattern of the classes (`architectures`) that are read. ignored:
    config keys that change nothing in this format, beside those of all formats (keys/without_effect.py).
    """

    kind: ClassVar[str]
    engine: str
    title: str
    versions: str
    serving: str
    embeds: bool | None = False
    weights: str = WEIGHTS
    within_base: ClassVar[bool] = False
    config_keys: ClassVar[tuple[str, ...]] = ()
    classes: ClassVar[str] = r".*"
    ignored: ClassVar[frozenset[str]] = frozenset()

    def recognises(self, files: Files) -> bool:
        """Are these files in this format? If several engines share a format, only one of them recognises it."""
        return False

    def ignores(self, path: tuple[str, ...]) -> bool:
        """Does the key at this path of the config change nothing that the head drafts?"""
        return not self.ignored.isdisjoint(path)

    def base_of(self, files: Files) -> str | None:
        """The name of the base given in the files, if any."""
        named = files.config.get("base_model_name_or_path")
        if "speculators_config" in files.config:
            named = table(table(files.config, "speculators_config"), "verifier").get("name_or_path")
        return named if isinstance(named, str) and named else None

    def part_of(self, files: Files) -> Files:
        """The files restricted to the head's tensors, for a head inside a larger checkpoint."""
        return files

    @abstractmethod
    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        """The options of the head that the files describe. CheckpointError if no head here can represent it."""

    @abstractmethod
    def names(self, head: Any, stored: Collection[str] = ()) -> dict[str, str]:
        """Our name → theirs, for every tensor that is the same in both; `translate` computes the others.

        stored: the names in the file being read, for formats with several naming schemes."""

    def translate(self, files: Files, head: Any, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        """Our tensors that are computed from theirs, and the names of their tensors that were used.

        Runs before the other shapes are compared. May return one tensor under several names, or a tensor of the base:
        the caller copies them."""
        return {}, set()

    @abstractmethod
    def refusals(self, head: Any, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        """Reasons why this format cannot hold the head; [] if it can."""

    @abstractmethod
    def config(self, head: Any, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        """config.json for a head for which refusals() is empty: what `options` reads."""

    def rename(self, head: Any, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
        """The head's tensors by their names, without embeddings: what `names` and `translate` read."""
        return {theirs: tensors[ours] for ours, theirs in self.names(head).items()}

    def texts(self, head: Any, base: PreTrainedModel) -> dict[str, str]:
        """Further text files of an export, by name; {folder} in a .yml is the export's path."""
        return {}

    def write(self, head: Any, tensors: dict[str, Tensor], base: PreTrainedModel) -> ExportFiles:
        """The files of an export, without embeddings."""
        config, named = self.config(head, tensors, base), self.rename(head, tensors, base)
        return ExportFiles(config, named, self.weights, self.texts(head, base), pickles=self.pickles(head, tensors))

    def pickles(self, head: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """What further files of an export hold that torch.save() writes, by name."""
        return {}

    def serve(self, base: str, folder: str, depth: int) -> str:
        """Markdown with the exact commands that serve the head, drafting `depth` tokens a step."""
        return fill_template(self.serving, base, folder, depth)


def read(
    form: Format, files: Files, base: PreTrainedModel, allow_nonfinite: bool = False
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The head in `files`: its config and its tensors by our names. CheckpointError says what is wrong."""
    if not any(t.is_floating_point() for t in files.shapes.values()):
        raise CheckpointError(f"{files}: none of its {len(files.shapes)} tensors holds floating point numbers")
    head = head_config(form, files, base)
    expected = meta_tensors(head)
    translated, consumed = form.translate(files, head, base)
    names = {ours: theirs for ours, theirs in form.names(head, files.shapes).items() if ours not in translated}
    _check(form, files, expected, names, consumed)
    tensors = translated | {ours: files.tensor(theirs) for ours, theirs in names.items()}
    if not allow_nonfinite:
        refuse_nonfinite(files, {names.get(ours, ours): t for ours, t in tensors.items()})
    return head, {name: tensors[name] for name in expected}


def head_config(form: Format, files: Files, base: PreTrainedModel) -> HeadConfig:
    """The head that the config in `files` describes. CheckpointError if no head here can represent it, or if the config
    has an option that nobody read and that may change what the head drafts. Reads no weight of the base."""
    refuse_unread_kind(files, files.config)
    files.config = config = ConfigTable(files.config)
    if strange := [name for name in architectures(config) if not re.fullmatch(form.classes, name)]:
        raise CheckpointError(
            f"{files} is of the class {shown(strange[0])}, which {form.title} does not have; if its tensors are of "
            "that format all the same, write a class of it into config.json"
        )
    options = form.options(files, base)
    try:
        head = HEADS[form.kind].Config.from_options(options).with_base_defaults(text_config(base))
        meta_tensors(head)
    except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{files}: its config does not describe a head of {form.title}: {reason(error)}"
        ) from error
    config.refuse_unread(files, form.ignores)
    return head


def meta_tensors(head: HeadConfig) -> dict[str, Tensor]:
    """The tensors of a head with this config, on the meta device, so that an untrusted config allocates nothing."""
    with torch.device("meta"):
        return HEADS[head.kind](head).state_dict()


def dtype_of(tensors: dict[str, Tensor]) -> str:
    """The name of the weights' dtype; if there are several, of the one that holds them all exactly."""
    return str(widest_dtype(tensors.values())).removeprefix("torch.")


def _check(form: Format, files: Files, expected: dict[str, Tensor], names: dict[str, str], consumed: set[str]) -> None:
    """CheckpointError, with the file's names, if its tensors are not those of the head."""
    shapes, wanted = files.shapes, {theirs: expected[ours] for ours, theirs in names.items()}
    wrong = phrase_names("missing", set(wanted) - set(shapes))
    wrong += phrase_names("unknown", set(shapes) - set(wanted) - consumed)
    for name in sorted(set(wanted) & set(shapes)):
        if shapes[name].shape != wanted[name].shape:
            wrong.append(f"{name} has shape {shortened(tuple(shapes[name].shape))}, not {tuple(wanted[name].shape)}")
        elif shapes[name].is_floating_point() != wanted[name].is_floating_point():
            wrong.append(f"{name} is {shapes[name].dtype}, where {wanted[name].dtype} was expected")
    if wrong:
        raise CheckpointError(f"{files}: its tensors are not those of {form.title}: {'; '.join(wrong[:8])}")


def phrase_names(what: str, names: Iterable[str]) -> list[str]:
    """One phrase with the first of the names; [] if there are none."""
    names = list(names)
    return [f"{what} {listing(names)}"] if names else []


def count(files: Files, prefix: str, part: str = "") -> int:
    """The number of layers or heads: of distinct i in tensor names `{prefix}{i}.…` that contain `part`.

    CheckpointError if there are more than any head has."""
    names = {name.removeprefix(prefix) for name in files.shapes if name.startswith(prefix) and part in name}
    indices = {name.partition(".")[0] for name in names}
    number = len({int(i) for i in indices if i.isascii() and i.isdigit() and len(i) < 6})
    if number > _MAX_LAYERS:
        raise CheckpointError(
            f"{files}: its tensors make up {number} heads or layers ({prefix}0 …); a head has at most {_MAX_LAYERS}"
        )
    return number


def check_sizes(files: Files, sizes: dict[str, int], base: PreTrainedModel) -> None:
    """CheckpointError if the head was made for a base with other sizes."""
    base_config = text_config(base)
    wrong = [
        f"{name} is {getattr(base_config, name)}, not {value}"
        for name, value in sizes.items()
        if getattr(base_config, name) != value
    ]
    if wrong:
        raise CheckpointError(f"{files} was made for another base: {', '.join(wrong)}, as its config has it")


def embeddings_of(base: PreTrainedModel) -> Tensor:
    """The base's embeddings (V, H). CheckpointError if they are not in memory."""
    weight = base.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    if weight.is_meta or not weight.numel():
        raise CheckpointError(
            "the base's embeddings are not in memory (offloaded or sharded), and this format needs them; load the base "
            "whole"
        )
    return weight.detach()


def embedding_scale(base: PreTrainedModel) -> float:
    """The factor by which the base's embedding module multiplies its rows. Heads here read the module's output, other
    programs' heads the rows themselves. CheckpointError if the module does more than scale."""
    module = base.get_input_embeddings()
    if type(module) is nn.Embedding:
        return 1.0
    weight = embeddings_of(base)
    ids = torch.arange(min(2, len(weight)), device=weight.device)
    outputs: list[Tensor] = []
    for value in (1, 2) if "weight" in dict(module.named_parameters(recurse=False)) else ():
        rows = weight.new_full((1, 1), value).expand_as(weight)
        with torch.no_grad():
            outputs.append(torch.func.functional_call(module, {"weight": rows}, (ids,)))
    scale = float(outputs[0].flatten()[-1]) if outputs else 0.0
    if not scale or any((rows != value * scale).any() for value, rows in enumerate(outputs, 1)):
        raise CheckpointError("the base's embedding module does more than scale its rows, which are what readers use")
    return scale


def scaled_embeddings(base: PreTrainedModel) -> list[str]:
    """The reason to refuse a format whose readers give a head unscaled embedding rows; [] if there is none."""
    try:
        scale = embedding_scale(base)
    except CheckpointError as error:
        return [str(error)]
    return [f"the base multiplies its embeddings by {scale:.2f}, and not all readers do"] if scale != 1 else []


def output_matrix(user: Files | str, base: PreTrainedModel) -> Tensor:
    """The base's output matrix (V, H). user: the file or format that drafts with it. CheckpointError if it cannot be
    used."""
    layer = base.get_output_embeddings()
    weight = applied_weight(layer)
    assert isinstance(weight, Tensor)
    if getattr(layer, "bias", None) is not None or weight.shape[-1] != text_config(base).hidden_size:
        raise CheckpointError(f"{user} uses the base's output layer, which is more than a matrix over the hidden size")
    if weight.is_meta or not weight.numel():
        raise CheckpointError(f"{user} uses the base's output matrix, which is not in memory; load the base whole")
    return weight.detach().to("cpu")


def check_embeddings(files: Files, name: str, base: PreTrainedModel, matrix: Tensor | None = None) -> None:
    """CheckpointError unless a tensor of the file equals `matrix`, with which heads here draft (default: the base's
    embeddings).

    They are compared in the coarser of the two dtypes, within the error of one rounding to bfloat16.
    """
    matrix, stored = embeddings_of(base) if matrix is None else matrix, files.shapes[name]
    if stored.shape != matrix.shape or not stored.is_floating_point():
        raise CheckpointError(
            f"{files}: {name} is {tuple(stored.shape)} of {stored.dtype}, not {tuple(matrix.shape)} as in the base"
        )
    read = files.tensor(name)
    if torch.equal(read, matrix.to("cpu", read.dtype)) or torch.equal(read.to(matrix.dtype), matrix.cpu()):
        return
    if torch.allclose(read.float(), matrix.cpu().float(), rtol=2**-7, atol=1e-4):
        return
    raise CheckpointError(
        f"{files}: {name} is not the base's matrix, and heads here draft with the base's own: it was made for another "
        "base, or trained too"
    )
