"""Each model family's names for the tensors of its MTP modules, and how its modules differ. Nothing is loaded here.

L is the number of the target's layers, k the index of a module. The names are those read by the loaders of vLLM, SGLang
and transformers (MtpModel).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_MODULES = 64  # modules of one target
_MTP = re.compile(r"(^|\.)mtp[._]")


@dataclass(frozen=True)
class Naming:
    """One family's names.

    title: name in messages. model_types: the targets written with these names. count: the config key with the number of
    modules. own: our name → theirs, as formats with {k} and {n} = L + k. layers: their prefix for each layer of a
    module. norm: their names for the final norm, of which the first is written; () for none. copies: names of copies of
    the base's embeddings and output matrix. options: head options that differ from the defaults. most: the most modules
    that the names allow. shared: the layers share one projection and one norm. prefixes: of all names; the first is
    written.
    """

    title: str
    model_types: Collection[str]
    count: str
    own: Mapping[str, str]
    layers: tuple[str, ...]
    norm: tuple[str, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    most: int = _MAX_MODULES
    shared: bool = False
    prefixes: tuple[str, ...] = ("",)

    def modules(self, names: Collection[str], num_layers: int) -> tuple[str, int]:
        """The prefix of all names, and the number of modules under it in `names`; 0 if there are none."""
        for prefix in self.prefixes:
            count = 0
            while count < self.most and self._has(prefix, count, num_layers, names):
                count += 1
            if count:
                return prefix, count
        return self.prefixes[0], 0

    def _has(self, prefix: str, k: int, num_layers: int, names: Collection[str]) -> bool:
        norms = [prefix + self._fill(name, k, num_layers) for name in self.norm]
        projection = prefix + self._fill(self.own["eh_proj.weight"], k, num_layers)
        return projection in names and (not norms or any(name in names for name in norms))

    def _fill(self, name: str, k: int, num_layers: int) -> str:
        return name.format(k=k, n=num_layers + k)

    def own_names(self, k: int, num_layers: int, stored: Collection[str], prefix: str, *, bias: bool) -> dict[str, str]:
        """Our name in module k → theirs, except for layers. stored: the names in a file, or () when writing one."""
        names = {ours: theirs for ours, theirs in self.own.items() if bias or not ours.endswith(".bias")}
        filled = {ours: prefix + self._fill(theirs, k, num_layers) for ours, theirs in names.items()}
        norms = [prefix + self._fill(name, k, num_layers) for name in self.norm]
        if norms:
            filled["norm.weight"] = next((name for name in norms if name in stored), norms[0])
        return filled

    def names_in(self, names: Collection[str], num_layers: int, prefix: str, count: int) -> set[str]:
        """Those of `names` in the first `count` modules, including their copies of the base's matrices."""
        wanted: set[str] = set()
        for k in range(count):
            wanted |= set(self.own_names(k, num_layers, names, prefix, bias=True).values())
            wanted |= set(self.copied(k, num_layers, prefix))
            starts = tuple(self.layer_prefixes(k, num_layers, prefix))
            wanted |= {name for name in names if name.startswith(starts)}
        return wanted & set(names)

    def all_names(self, names: Collection[str], num_layers: int) -> set[str]:
        """Those of `names` in any module."""
        return set().union(*(self.names_in(names, num_layers, prefix, _MAX_MODULES) for prefix in self.prefixes))

    def of_modules(self, names: Collection[str], num_layers: int) -> set[str]:
        """Those of `names` that belong to MTP modules, whether or not this family knows them."""
        return self.all_names(names, num_layers) | {name for name in names if _MTP.search(name)}

    def layer_prefixes(self, k: int, num_layers: int, prefix: str) -> list[str]:
        return [prefix + self._fill(each, k, num_layers) for each in self.layers]

    def copied(self, k: int, num_layers: int, prefix: str) -> dict[str, str]:
        """Names of their copies of the base's matrices → "embeddings" or "output"."""
        return {prefix + self._fill(name, k, num_layers): what for name, what in self.copies.items()}


def _own(enorm: str, hnorm: str, projection: str) -> dict[str, str]:
    return {
        "enorm.weight": f"{enorm}.weight", "hnorm.weight": f"{hnorm}.weight", "eh_proj.weight": f"{projection}.weight",
        "eh_proj.bias": f"{projection}.bias",
    }  # fmt: skip


_BY_NUMBER = "model.layers.{n}."
DEEPSEEK = Naming(
    "DeepSeek's and GLM's MTP modules",
    ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    "num_nextn_predict_layers",
    _own(f"{_BY_NUMBER}enorm", f"{_BY_NUMBER}hnorm", f"{_BY_NUMBER}eh_proj"),
    (_BY_NUMBER,),
    (f"{_BY_NUMBER}shared_head.norm.weight",),
    {f"{_BY_NUMBER}embed_tokens.weight": "embeddings", f"{_BY_NUMBER}shared_head.head.weight": "output"},
)
LING = Naming(
    "Ling's MTP modules", ("bailing_hybrid", "bailing_moe_v2"), "num_nextn_predict_layers",
    DEEPSEEK.own, DEEPSEEK.layers, (f"{_BY_NUMBER}final_layernorm.weight",),
)  # fmt: skip
QWEN = Naming(
    "Qwen's MTP module",
    (
        "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "exaone_moe", "exaone4_5",
        "mellum",
    ),
    "mtp_num_hidden_layers",
    _own("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"),
    ("mtp.layers.{k}.",),
    ("mtp.norm.weight",),
    most=1, shared=True,
)  # fmt: skip
MIMO = Naming(
    "MiMo-7B's MTP modules", ("mimo", "qwen2"), "num_nextn_predict_layers",
    _own("model.mtp_layers.{k}.token_layernorm", "model.mtp_layers.{k}.hidden_layernorm",
         "model.mtp_layers.{k}.input_proj"),
    ("model.mtp_layers.{k}.",), ("model.mtp_layers.{k}.final_layernorm.weight",),
    options={"hidden_first": True},
)  # fmt: skip
ERNIE = Naming(
    "ERNIE 4.5's MTP modules", ("ernie4_5", "ernie4_5_moe"), "num_nextn_predict_layers",
    _own("model.mtp_emb_norm.{k}", "model.mtp_hidden_norm.{k}", "model.mtp_linear_proj.{k}"),
    ("model.mtp_block.{k}.",), (), options={"final_norm": False},
)  # fmt: skip
NEMOTRON = Naming(
    "Nemotron-H's MTP module", ("nemotron_h",), "num_nextn_predict_layers",
    _own("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj"),
    ("mtp.layers.0.", "mtp.layers.1."), ("mtp.layers.1.final_layernorm.weight",), most=1,
    prefixes=("", "language_model."),
)  # fmt: skip
SPECULATORS = Naming(  # of Qwen's module in a file of its own; written under the model's own names
    "speculators' MTP module", (), "num_nextn_predict_layers",
    _own("mtp_layers.{k}.token_layernorm", "mtp_layers.{k}.hidden_layernorm", "mtp_layers.{k}.input_proj"),
    ("mtp_layers.{k}.",), ("mtp_layers.{k}.final_layernorm.weight",), most=1,
)  # fmt: skip
NAMINGS = (DEEPSEEK, LING, QWEN, MIMO, ERNIE, NEMOTRON, SPECULATORS)

# A name that only these modules have → why no head here can hold them.
REFUSED = {
    r"model\.layers\.\d+\.transformer\.shared_head\.": "Step's modules read the target's hidden state before its "
    "final norm, which transformers does not give, and have output matrices of their own",
    r"(model\.)?mtp\.\d+\.(e_proj|h_proj|hc_head_fn)": "DeepSeek-V4's modules add two projections and read the "
    "target's residual streams, which transformers does not give",
    r"model\.mtp\.layers\.\d+\.transformer_layer\.": "LongCat's module has embeddings of its own",
    r"model\.mtp\.layers\.\d+\.pre_mlp_layernorm": "of MiMo-V2's modules, readers disagree on whether they read the "
    "target's hidden state before or after its final norm",
    r"mtp\.layers\.\d+\.transformer_block\.": "Inkling's modules have a block of another form than transformers' layer",
}  # fmt: skip


def refused(names: Collection[str]) -> str | None:
    """Why the MTP modules of a checkpoint with these tensor names cannot be read; None if there is no reason."""
    for pattern, why in REFUSED.items():
        compiled = re.compile(pattern)
        if any(compiled.match(name) for name in names):
            return why
    return None
