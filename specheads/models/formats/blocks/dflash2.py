"""DFlash 2 and Domino: DFlash's format with more in its table, as z-lab, SpecForge, vLLM and SGLang share it.

DFlash 2 has convolutions around each sublayer and a selector, Domino a recurrent correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from specheads.heads import ParallelConfig
from specheads.models.files import CheckpointError
from specheads.models.formats.blocks import dflash, forms
from specheads.models.formats.files import Files
from specheads.models.formats.format import embedding_scale
from specheads.models.formats.keys.config_table import architectures, flag, quoted, real, table, whole
from specheads.models.formats.parts import layer_ids
from specheads.models.formats.parts.positions import GGUF, SGLANG
from specheads.models.formats.serving import SGLANG_BLOCK, WHOLE_BLOCK, llamacpp, vllm_gpu
from specheads.options import shown

_TABLE = "dflash_config"


@dataclass(frozen=True)
class DFlash2(dflash.DFlash):
    classes: ClassVar[str] = r"DFlash2(Beam)?DraftModel"
    architecture: ClassVar[str] = "DFlash2DraftModel"
    takes: tuple[str, ...] = ("selector",)
    convolved: bool = True
    scaled: bool = True

    def recognises(self, files: Files) -> bool:
        config = files.config
        named = any(name.startswith("DFlash2") for name in architectures(config))
        known = named or "selector_rank" in table(config, _TABLE)
        return known and "speculators_model_type" not in config and self.engine == "dflash"

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        options, inner = super().options(files, base), table(files.config, _TABLE)
        _embedding_factor(inner)  # compared in `translate`, since this may not read the base's weights
        return {
            **options, **forms.read_dflash2_options(inner, usual=False),
            **forms.read_logit_options(files, inner, base),
        }  # fmt: skip

    def translate(
        self, files: Files, head: ParallelConfig, base: PreTrainedModel
    ) -> tuple[dict[str, Tensor], set[str]]:
        config = table(files.config, _TABLE)
        if "input_embedding_scale" in config:
            theirs, ours = _embedding_factor(config), embedding_scale(base)
            if abs(theirs / ours - 1) > 1e-3:
                raise CheckpointError(
                    f"{files}: it reads embeddings times {theirs:g} (input_embedding_scale), and the base multiplies "
                    f"its own by {ours:g}"
                )
        return super().translate(files, head, base)

    def config(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        config = super().config(head, tensors, base)
        config |= {"architectures": [self.architecture], "is_causal": head.causal}
        config[_TABLE] |= {"block_size": head.block_size, **forms.dflash2_keys(head), **forms.logit_keys(head, base)}
        return config

    def refusals(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        wrong = super().refusals(head, tensors, base)
        if head.markov_type != "selector":
            wrong.append("it has no selector (markov_type=selector)")
        pairs = head.candidates * (head.candidates + 1)
        if self.engine == "llamacpp" and pairs > (head.hidden_size or 0):
            wrong.append(
                f"its {head.candidates} candidates make {pairs} scores a slot, which llama.cpp keeps in a row of the "
                f"hidden size, {head.hidden_size}"
            )
        return wrong


@dataclass(frozen=True)
class Domino(dflash.DFlash):
    """SpecForge's class is DominoDraftModel; SGLang takes DFlashDraftModel alone."""

    classes: ClassVar[str] = r"D(omino|Flash)DraftModel"
    takes: tuple[str, ...] = ("domino",)
    from_anchor: bool | None = None

    def recognises(self, files: Files) -> bool:
        config = files.config
        named = any(name.startswith("Domino") for name in architectures(config))
        return named or table(config, _TABLE).get("projector_type") == "domino"

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config, inner = files.config, table(files.config, _TABLE)
        if (kind := inner.get("projector_type", "domino")) != "domino":
            raise CheckpointError(f"{files}: its config says {_TABLE}.projector_type={shown(kind)}; expected domino")
        sizes = {whole(part, "emb_dim") for part in (inner, config) if part.get("emb_dim") is not None}
        if len(sizes) != 1:
            raise CheckpointError(f"{files}: its config has emb_dim={quoted(sorted(sizes))}; expected one")
        return {
            **super().options(files, base), "markov_type": "domino", "markov_rank": sizes.pop(),
            "gru_size": whole(inner, "gru_hidden_dim"), "sample_from_anchor": flag(inner, "shift_label"),
            "plain_drafts": whole(inner, "pure_draft_prefix_len", 0, least=0),
        }  # fmt: skip

    def config(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        config = super().config(head, tensors, base)
        config[_TABLE] |= {
            "projector_type": "domino", "emb_dim": head.markov_rank, "gru_hidden_dim": head.gru_size,
            "pure_draft_prefix_len": head.plain_drafts, "shift_label": head.sample_from_anchor,
        }  # fmt: skip
        return config

    def refusals(self, head: ParallelConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        wrong = super().refusals(head, tensors, base)
        if head.markov_type != "domino":
            wrong.append("it has no GRU (markov_type=domino)")
        elif head.plain_drafts != 1:
            wrong.append(f"it leaves {head.plain_drafts} drafts as they are (plain_drafts), and SGLang 1")
        return wrong


def _embedding_factor(inner: dict[str, Any]) -> float:
    return real(inner, "input_embedding_scale", 1.0)


FORMATS = (
    DFlash2(
        "dflash", "DFlash 2 (z-lab's format, which the servers share)", "z-lab/dflash, vLLM 0.33, SGLang 0.5.23",
        f"{vllm_gpu('dflash')}\n{WHOLE_BLOCK}\nBy SGLang:\n\n{SGLANG_BLOCK}", last=layer_ids.SGLANG_LAST_OF_BLOCKS,
        takes_mask=True,
    ),
    DFlash2(
        "vllm", "DFlash 2 for vLLM", "vLLM 0.33", f"{vllm_gpu('dflash')}\n{WHOLE_BLOCK}\n", last=None, takes_mask=True,
    ),
    DFlash2(
        "sglang", "DFlash 2 for SGLang", "SGLang 0.5.23", SGLANG_BLOCK, positions=SGLANG,
        last=layer_ids.SGLANG_LAST_OF_BLOCKS, takes_mask=True,
    ),
    DFlash2(
        "llamacpp", "DFlash 2 for llama.cpp", "llama.cpp b11434", llamacpp("dflash"), takes_biases=False,
        positions=GGUF, last=layer_ids.LLAMACPP_LAST_OF_BLOCKS,
    ),
    Domino(
        "sglang", "Domino for SGLang", "SGLang 0.5.23, which wants bfloat16 and a GPU", SGLANG_BLOCK, positions=SGLANG,
        last=layer_ids.SGLANG_LAST_OF_BLOCKS, takes_mask=True,
    ),
)  # fmt: skip
