"""MTP modules in a model's own checkpoint: read from its files, and written into a copy of its index.

transformers drops these tensors when it loads the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import text_config
from specheads.heads import MtpConfig
from specheads.heads.mtp.target_layers import TargetLayers, config_table
from specheads.models.files import CONFIG, CheckpointError, read_header, read_table
from specheads.models.formats.files import INDEX, Files
from specheads.models.formats.format import ExportFiles, Format, check_embeddings, meta_tensors, output_matrix
from specheads.models.formats.keys.config_table import table
from specheads.models.formats.mtp.beside import BaseFiles
from specheads.models.formats.mtp.layer_tensors import LayerTensors
from specheads.models.formats.mtp.naming import NAMINGS, Naming, refused
from specheads.options import listing, shown

_NESTED, _ZERO_FIRST = "text_config", "specheads_zero_first_embedding"
_OF_MODULES = re.compile("mtp|nextn")  # keys about modules
_SHOWN = {
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_mlp_layer_types",
    "mtp_layers_block_type", "mtp_hybrid_override_pattern",
}  # fmt: skip


class Modules(NamedTuple):
    """The modules found in a checkpoint: the family's naming, the prefix of all names, and the number of modules."""

    naming: Naming
    prefix: str
    number: int


def find_modules(files: Files, num_layers: int) -> Modules | None:
    """The MTP modules in a checkpoint, found by tensor names; None if there are none. num_layers: of the target."""
    for naming in NAMINGS:
        prefix, count = naming.modules(files.names, num_layers)
        if count:
            return Modules(naming, prefix, count)
    return None


def naming_of(model_type: str) -> Naming | None:
    """The naming to write modules of a target of this type with; None if no program reads any."""
    return next((naming for naming in NAMINGS if model_type in naming.model_types), None)


def layer_form(target: TargetLayers, index: int) -> tuple:
    return tuple((name, tensor.shape) for name, tensor in target.layers[index].state_dict().items())


def layer_forms(config: dict[str, Any]) -> dict[tuple, int]:
    """Each distinct form of the target's layers → the index of the layer that stands for it."""
    target = TargetLayers(config)
    usual = target.usual_indices()[0]
    forms: dict[tuple, int] = {}
    for index in (usual, *reversed(range(len(target.layers)))):
        forms.setdefault(layer_form(target, index), index)
    return forms


class ModuleFiles(Files):
    """A checkpoint restricted to some of its tensors, and to the files that hold them."""

    def __init__(self, files: Files, names: Collection[str]) -> None:
        super().__init__(files.source, files.hub, files.allow_pickle)
        self._names = set(names)

    @property
    def _wanted(self) -> Collection[str]:
        return self._names

    @cached_property
    def shapes(self) -> dict[str, Tensor]:
        shapes: dict[str, Tensor] = {}
        paths = {self.weights} if self._index is None else {self._shards[self._index[name]] for name in self._names}
        for path in paths:
            assert path is not None
            shapes |= read_header(path, self._names)[0]
        if missing := self._names - shapes.keys():
            raise CheckpointError(f"{self} has no {min(missing)}, which its index names; copy it again")
        return dict(sorted(shapes.items()))


class Shipped(Format):
    """MTP modules under their family's names (`naming.NAMINGS`)."""

    kind = MtpConfig.kind
    engine, title = "mtp", "MTP modules of a model's own checkpoint"
    versions = "vLLM 0.32, SGLang 0.5.23 and transformers 5.23"
    embeds = None
    within_base = True
    serving = """\
This folder is the model itself: its index names the modules, in mtp.safetensors, and its other files are links to the
model's own. If the model was not in a folder, copy its files here first. vLLM drafts with the first module alone, fed
with its own output, and refuses more tokens than there are modules unless they are a multiple of that number.

```bash
vllm serve $folder_arg --speculative-config '{"method": "mtp", "num_speculative_tokens": $depth}'
python -m sglang.launch_server --model-path $folder_arg --speculative-algorithm NEXTN \\
  --speculative-num-steps $depth --speculative-eagle-topk 1 --speculative-num-draft-tokens $nodes
```
"""

    def recognises(self, files: Files) -> bool:
        if files.pickled:
            return False
        return refused(files.names) is not None or find_modules(files, _num_layers(files.config)) is not None

    def ignores(self, path: tuple[str, ...]) -> bool:
        """The config is the base's, which transformers reads; of the modules' keys, those that their tensors show."""
        return path[-1] in _SHOWN or not _OF_MODULES.search(path[-1])

    def base_of(self, files: Files) -> str | None:
        named = files.config.get("base_model_name_or_path")
        return named if isinstance(named, str) and named else str(files.folder or files.source)

    def part_of(self, files: Files) -> Files:
        if (why := refused(files.names)) is not None:
            raise CheckpointError(f"{files} holds MTP modules that no head here can hold: {why}")
        layers = _num_layers(files.config)
        modules = find_modules(files, layers)
        assert modules is not None
        naming, prefix, count = modules
        further = naming.layer_prefixes(count, layers, prefix)[0]
        if naming.shared and any(name.startswith(further) for name in files.names):
            raise CheckpointError(f"{files}: its MTP layers share one projection, and heads here have one each")
        wanted = naming.names_in(files.names, layers, prefix, count)
        if others := naming.of_modules(files.names, layers) - wanted:
            raise CheckpointError(
                f"{files}: {listing(others)} are of no MTP module that a head here can hold: it lacks its projection "
                "or norm, or is of another form; copy the checkpoint again"
            )
        return ModuleFiles(files, wanted)

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config, layers = files.config, text_config(base).num_hidden_layers
        if (modules := find_modules(files, layers)) is None:
            raise CheckpointError(f"{files} holds MTP modules of a target with another number of layers than {layers}")
        naming = modules.naming
        if coarse := [name for name, t in files.shapes.items() if not (t.is_floating_point() and t.element_size() > 1)]:
            raise CheckpointError(f"{files}: {coarse[0]} is quantised, and heads here are not; take a copy in bfloat16")
        table_ = config_table(text_config(base))
        names = naming.own_names(0, layers, files.names, modules.prefix, bias=True)
        return {
            "num_modules": modules.number, "target_config": table_, "steps": max(5, modules.number),
            "layer_indices": self._indices(files, table_, layers, modules),
            "fc_bias": names["eh_proj.bias"] in files.names, **naming.options,
            "zero_first_embedding": bool(config.get(_ZERO_FIRST, False)),
        }  # fmt: skip

    def _layer(self, files: Files, k: int, j: int, layers: int, modules: Modules) -> dict[str, Tensor]:
        """The tensors of layer j of module k, with the checkpoint's names and storage form."""
        naming, prefix, _ = modules
        start = naming.layer_prefixes(k, layers, prefix)[j]
        apart = {*naming.own_names(k, layers, files.names, prefix, bias=True).values()}
        apart |= set(naming.copied(k, layers, prefix))
        return {
            name.removeprefix(start): files.tensor(name)
            for name in files.shapes
            if name.startswith(start) and name not in apart
        }  # fmt: skip

    def _indices(self, files: Files, config: dict[str, Any], layers: int, modules: Modules) -> tuple[int, ...]:
        """For each module layer, the target layer of the same form, by its tensors, and of the type that the config
        gives to module layers, if it does (Mellum). CheckpointError if none matches."""
        convert, forms, target = LayerTensors(config), layer_forms(config), TargetLayers(config)
        file_config = files.config
        types = (table(file_config, _NESTED) or file_config).get("mtp_layer_types") or []
        indices: list[int] = []
        for j in range(len(modules.naming.layers)):
            tensors, why = self._layer(files, 0, j, layers, modules), ""
            for i in forms.values():
                converted = convert.from_checkpoint(tensors, i)
                if isinstance(converted, dict):
                    kind = types[j] if isinstance(types, list) and j < len(types) else target.type_of(i)
                    alike = (
                        n for n in (i, *range(len(target.layers))) if layer_form(target, n) == layer_form(target, i)
                    )
                    if (index := next((n for n in alike if target.type_of(n) == kind), None)) is None:
                        raise CheckpointError(f"{files}: layer {j} of its MTP module is of type {shown(kind)} "
                                              "(mtp_layer_types), and none of the target's is")  # fmt: skip
                    indices.append(index)
                    break
                why = why or converted
            else:
                raise CheckpointError(f"{files}: layer {j} of its MTP module is like none of the target's: {why}")
        return tuple(indices)

    def names(self, head: MtpConfig, stored: Collection[str] = ()) -> dict[str, str]:
        return {}  # all are translated

    def translate(self, files: Files, head: MtpConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        assert head.target_config and head.layer_indices
        layers = text_config(base).num_hidden_layers
        modules = find_modules(files, layers)
        assert modules is not None
        naming, prefix, _ = modules
        convert = LayerTensors(head.target_config)
        tensors: dict[str, Tensor] = {}
        for k in range(head.num_modules):
            for name, what in naming.copied(k, layers, prefix).items():
                if name in files.shapes:
                    check_embeddings(files, name, base, None if what == "embeddings" else output_matrix(files, base))
            names = naming.own_names(k, layers, files.names, prefix, bias=head.fc_bias)
            if missing := [theirs for theirs in names.values() if theirs not in files.shapes]:
                raise CheckpointError(f"{files}: its MTP module lacks {missing[0]}")
            tensors |= {f"mtp.{k}.{ours}": files.tensor(theirs) for ours, theirs in names.items()}
            for j, index in enumerate(head.layer_indices):
                converted = convert.from_checkpoint(self._layer(files, k, j, layers, modules), index)
                if isinstance(converted, str):
                    raise CheckpointError(f"{files}: layer {j} of MTP module {k} is not as in module 0: {converted}")
                tensors |= {f"mtp.{k}.layers.{j}.{name}": tensor for name, tensor in converted.items()}
        for name, wanted in meta_tensors(head).items():
            if tensors[name].shape != wanted.shape:
                raise CheckpointError(
                    f"{files}: {name} has shape {tuple(tensors[name].shape)}, not {tuple(wanted.shape)}"
                )
        return tensors, set(files.shapes)

    def refusals(self, head: MtpConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        assert head.layer_indices
        kind = text_config(base).model_type
        if (naming := naming_of(kind)) is None:
            return [f"models of type {kind} have no such modules in the programs that read them"]
        wanted: dict[str, Any] = {
            "hidden_first": False,
            "final_norm": True,
            "norm_output": True,
            "sliding_window": None,
        }
        wanted |= naming.options
        values = {name: getattr(head, name) for name in wanted}
        wrong = [f"it has {name}={value}" for name, value in values.items() if value != wanted[name]]
        if head.taps != (text_config(base).num_hidden_layers,):
            wrong.append("it does not read the output of the final norm")
        if head.num_modules > naming.most:
            wrong.append(f"it has {head.num_modules} modules, and {naming.most} can be named")
        if len(head.layer_indices) != len(naming.layers):
            wrong.append(f"its modules have {len(head.layer_indices)} layers, and theirs have {len(naming.layers)}")
        return wrong or self._other_layers(naming, head, tensors, base)

    def _other_layers(
        self, naming: Naming, head: MtpConfig, tensors: dict[str, Tensor], base: PreTrainedModel
    ) -> list[str]:
        """Reasons why readers would build the modules' layers in the form of a different target layer."""
        assert head.target_config and head.layer_indices
        target, forms = TargetLayers(head.target_config), layer_forms(head.target_config)
        for index in head.layer_indices:
            read_as = forms[layer_form(target, index)]
            if (kind := target.type_of(index)) != (other := target.type_of(read_as)):
                return [
                    f"its modules are like layer {index} of the target ({kind}), and their tensors would be read as "
                    f"those of layer {read_as} ({other}): train modules with layer_indices={read_as}"
                ]
        layers = text_config(base).num_hidden_layers
        try:
            shipped = naming.names_in(BaseFiles.of(base).weights, layers, naming.prefixes[0], 1)
        except CheckpointError as error:
            return [str(error)]
        if shipped:
            meta = {name: tensor.to("meta") for name, tensor in tensors.items() if name.startswith("mtp.0.")}
            named = self._named(naming, replace(head, num_modules=1), meta, layers)
            if unknown := sorted(name for name in named if name.endswith(".weight") and name not in shipped):
                return [f"the modules that the model ships lack {listing(unknown, 2)}, and readers build theirs: train "
                        "modules with layer_indices of a layer of that form"]  # fmt: skip
        return []

    def config(self, head: MtpConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        naming, folder = naming_of(text_config(base).model_type), BaseFiles.of(base).folder
        assert naming is not None
        config = None if folder is None else read_table(folder / CONFIG)
        config = json.loads(base.config.to_json_string()) if config is None else config
        (table(config, _NESTED) or config)[naming.count] = head.num_modules
        config.pop(_ZERO_FIRST, None)
        return config | ({_ZERO_FIRST: True} if head.zero_first_embedding else {})

    def write(self, head: MtpConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> ExportFiles:
        naming, layers = naming_of(text_config(base).model_type), text_config(base).num_hidden_layers
        assert naming is not None
        named, of_base = self._named(naming, head, tensors, layers), BaseFiles.of(base)
        kept = of_base.without(naming.all_names(of_base.weights, layers))
        config = self.config(head, tensors, base)
        return ExportFiles(config, named, kept.new_file, {INDEX: kept.index(named)}, kept.links())

    def _named(self, naming: Naming, head: MtpConfig, tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
        """The head's tensors by the family's names. layers: of the target."""
        assert head.target_config and head.layer_indices
        convert, prefix = LayerTensors(head.target_config), naming.prefixes[0]
        named: dict[str, Tensor] = {}
        for k in range(head.num_modules):
            names = naming.own_names(k, layers, (), prefix, bias=head.fc_bias)
            named |= {theirs: tensors[f"mtp.{k}.{ours}"] for ours, theirs in names.items()}
            for j, (start, index) in enumerate(
                zip(naming.layer_prefixes(k, layers, prefix), head.layer_indices, strict=True)
            ):
                inner = f"mtp.{k}.layers.{j}."
                layer = {n.removeprefix(inner): t for n, t in tensors.items() if n.startswith(inner)}
                named |= {start + name: tensor for name, tensor in convert.to_checkpoint(layer, index).items()}
        return named


def _num_layers(config: dict[str, Any]) -> int:
    """The number of the target's layers, from a config that may nest it; −1 if it is not given."""
    nested = table(config, _NESTED) or config
    value = nested.get("num_hidden_layers", nested.get("n_layer"))
    return value if type(value) is int else -1


FORMATS: list[Format] = [Shipped()]
