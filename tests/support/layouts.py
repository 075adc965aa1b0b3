"""Published layouts of draft heads, each built tiny with its own writer's key names and config, and what happens to it
here. `python -m tests.support.layouts` prints the table of docs/compatibility.md; `--write` puts it there.

Equal: what the head drafts in decoding is what a plain forward drafts that shares no code with the library, within 1e-5
of the largest logit. Same text: it loads, and greedy text is the base's; its drafts are compared with nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as hf_logging

from specheads import CheckpointError, SpecModel
from specheads.models.formats.export.exporting import engines_for
from tests.reference import (
    foreign,
    foreign_blocks,
    foreign_depths,
    foreign_modelopt,
    foreign_others,
    foreign_rope,
    published_keys,
)
from tests.support import shipped_mtp
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.mtp_drafts import (
    BY_TRANSFORMERS,
    PLAIN,
    assert_drafts_of_transformers,
    assert_outputs_of_a_plain_implementation,
)
from tests.support.paths import ROOT
from tests.support.prompts import PROMPTS
from tests.support.tiny_models import tiny_llama

PAGE, HEADING = ROOT / "docs" / "compatibility.md", "### Published layouts"
EQUAL, TEXT = "equal", "same text"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """head: its kind. writer: the program that wrote it. options: what is special about it. build(folder, base) writes
    it. check(model, base, tensors, folder) raises AssertionError if its drafts are not those of its own forward; None:
    they are compared with nothing. base: makes its base, None where it is in the folder."""

    head: str
    writer: str
    options: str
    build: Callable[[Path, Any], Tensors]
    check: Callable[[SpecModel, Any, Tensors, Path], None] | None = None
    base: Callable[[], Any] | None = tiny_llama


# --- Checks ---


def lm_head_of(base):
    return base.get_output_embeddings().weight.detach()


def drafted_ids(tensors):
    return torch.arange(len(tensors["d2t"])) + tensors["d2t"] if "d2t" in tensors else None


def check_eagle3(model, base, tensors, folder, *, flags=(), later=(), **options):
    """later: how many blocks follow the first, as ModelOpt or vLLM name them."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    older = {f"aux_norm_{level}.weight": f"fc_norm.{i}.weight" for i, level in enumerate(("low", "mid", "high"))}
    tensors = {older.get(name, name): tensor for name, tensor in tensors.items()}
    first = next(p for p in ("midlayer.0.", "midlayer.", "layers.0.") if f"{p}hidden_norm.weight" in tensors)
    embed = tensors["embed_tokens.weight"] if model.head.config.own_embeddings else embeddings(base)
    output = tensors.get("lm_head.weight", lm_head_of(base))

    def forward(states, tokens, drafted):
        return foreign.eagle3_logits(
            tensors,
            first,
            states,
            model.head.layers,
            embed,
            tokens,
            drafted,
            flags,
            later=later,
            output=output,
            **options,
        )

    assert_drafts(model, forward, drafted_ids(tensors))


def check_peagle(model, base, tensors, folder, layers=2):
    check_eagle3(
        model, base, tensors, folder, mask=foreign_blocks.MASK, later=[f"layers.{i}." for i in range(1, layers)]
    )


def check_eagle(model, base, tensors, folder):
    theirs = {"fusion_fc": "fc", "transformer": "layers.0"}  # of speculators
    tensors = {re.sub("^(fusion_fc|transformer)", lambda m: theirs[m[0]], name): t for name, t in tensors.items()}
    assert_drafts(model, lambda s, t, d: foreign.eagle_logits(tensors, s, embeddings(base), lm_head_of(base), t, d))


def check_medusa(model, base, tensors, folder, layers=1):
    assert_drafts(
        model,
        lambda s, t, d: foreign_depths.medusa_logits(tensors, s[-1][-1], lm_head_of(base), layers=layers),
        tensors.get("token_map"),
    )


def check_hydra(model, base, tensors, folder, prefix=False):
    of_base = base if prefix else None
    assert_drafts(model, lambda s, t, d: foreign_depths.hydra_logits(tensors, s, embeddings(base), t, d, base=of_base))


def check_block(model, base, tensors, folder, *, form, embed=None, **options):
    lm_head = tensors["lm_head.weight"] if "d2t" in tensors else lm_head_of(base)
    embed = embeddings(base) if embed is None else embed(base, folder)
    assert_drafts(
        model,
        lambda s, t, d: foreign_blocks.logits(tensors, form, s, embed, lm_head, t, d, **options),
        drafted_ids(tensors),
    )


def check_module(model, base, tensors, folder, family):
    if family in BY_TRANSFORMERS:
        assert_drafts_of_transformers(folder)
    else:
        assert_outputs_of_a_plain_implementation(folder, tensors, family)


# --- Builders that combine those of tests/reference ---


def renamed(folder, base, write, names, config=None):
    """A head whose tensors are called otherwise: names(name) → name. config: further keys."""
    tensors = write(folder, base)
    (folder / "model.safetensors").unlink(missing_ok=True)
    said = json.loads((folder / "config.json").read_text())
    return foreign.write(folder, said | (config or {}), {names(name): tensor for name, tensor in tensors.items()})


def with_keys(folder, base, write, keys, table=""):
    """A head whose config has further keys, at the top or in a table."""
    tensors = write(folder, base)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config[table] if table else config).update(keys)
    path.write_text(json.dumps(config))
    return tensors


def with_norms(folder, base, write, keys, table=""):
    """A head of Qwen3's block: norms on queries and keys too."""
    tensors, make = with_keys(folder, base, write, keys, table), foreign.Random(18)
    tensors |= {f"layers.0.self_attn.{m}_norm.weight": make.norm(foreign.HEAD_DIM) for m in "qk"}
    return foreign.write(folder, None, tensors)


def with_biases(folder, base, write):
    tensors = write(folder, base)
    tensors |= foreign_modelopt.biases("layers.0.", output=True)
    return foreign.write(folder, None, tensors)


def with_mask(folder, base, form):
    tensors = foreign_blocks.head(folder, form)
    torch.save(foreign.Random(3)(32), folder / "mask_embedding.pt")
    return tensors


def masked(base, folder):
    embed = embeddings(base).clone()
    embed[foreign_blocks.MASK] = torch.load(folder / "mask_embedding.pt")
    return embed


def module(folder, base, family):
    return shipped_mtp.write(folder, family, sharded=False)


def odd_module(folder, base, name):
    """A target whose module has a tensor of this name, and so another form than those that are read."""
    modules = shipped_mtp.write(folder, "mimo", sharded=False)
    own = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in modules}
    save_file({**own, name: torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    return {}


def gpt_oss():
    from tests.support.families import FAMILIES, build

    name, options = FAMILIES["gpt-oss"]
    return build(name, {**options, "num_hidden_layers": foreign.N})


def e3(form, **options):
    return lambda folder, base: foreign.eagle3(folder, form, **options)


def e3_embedded(form, **options):
    return lambda folder, base: foreign.eagle3(folder, form, embed=embeddings(base), **options)


def e1(form, **options):
    return lambda folder, base: foreign.eagle(folder, form, embed=embeddings(base), **options)


def block_head(form, **options):
    return lambda folder, base: foreign_blocks.head(folder, form, base=base, **options)


def alone(write, *options):
    return lambda folder, base: write(folder, *options)


FULL, NEAR = "full_attention", "sliding_attention"


def near(*kinds):
    return {"layer_types": list(kinds), "sliding_window": 4, "use_sliding_window": True}


# --- The layouts ---

EAGLE1 = [
    Layout("EAGLE-1, EAGLE-2", "EAGLE repository", "bias of `fc`, pickle", e1("eagle"), check_eagle),
    Layout("EAGLE-1, EAGLE-2", "for vLLM", "no bias, no embeddings", e1("vllm", bias=False), check_eagle),
    Layout("EAGLE-1, EAGLE-2", "for SGLang", "`LlamaForCausalLMEagle`", e1("sglang"), check_eagle),
    Layout("EAGLE-1", "HASS", "`add_para_norm`", e1("vllm", bias=False, add_para_norm=True)),
    Layout("EAGLE-1", "vLLM's wrapper", "`model_type: eagle`", alone(foreign_others.vllm_eagle)),
    *[
        Layout(
            head,
            "speculators 0.1",
            f"type `eagle`{more}",
            partial(lambda folder, base, **keys: foreign.speculators_eagle(folder, embeddings(base), **keys), **keys),
            check_eagle,
        )
        for head, more, keys in (
            ("EAGLE-1", "", {}),
            ("HASS", ", `fusion_bias`", {"bias": True}),
            ("EAGLE-1", ", `layernorms`", {"layernorms": True}),
        )
    ],
]
NORM_KEYS = {"norm_before_residual": True}
QWEN3_TABLE = {"model_type": "qwen3"}
EAGLE3 = [
    Layout("EAGLE-3", "EAGLE repository", "`midlayer.*`, pickle", e3("eagle"), check_eagle3),
    Layout("EAGLE-3", "SpecForge", "layers in `eagle_config`, a copy of the embeddings",
           e3_embedded("specforge", nested=[0, 2, 5]), check_eagle3),
    Layout("EAGLE-3", "for vLLM", "layers at the top", e3("vllm", top=[1, 3, 6]), check_eagle3),
    Layout("EAGLE-3", "for SGLang", "two layers read, all tokens", e3("sglang", nested=[2, 6], draft=97), check_eagle3),
    Layout("EAGLE-3", "AngelSlim", "`Eagle3LlamaForCausalLM`, Hunyuan's keys", e3(
        "vllm", **published_keys.EAGLE3 | published_keys.HUNYUAN | {"architectures": ["Eagle3LlamaForCausalLM"]}
    ), check_eagle3),
    Layout("EAGLE-3", "SpecForge, AngelSlim", "for vision models (`mrope`)",
           e3("vllm", rope_scaling={"type": "mrope", "mrope_section": [2, 2, 2]}), check_eagle3),
    Layout("EAGLE-3", "speculators 0.3", "`Eagle3Speculator`, transformers' whole config inside", lambda folder, base:
           with_keys(folder, base, e3("speculators", architectures=["Eagle3Speculator"], speculators_version="0.3.0"),
                     {**published_keys.TRANSFORMERS, **published_keys.COMMON} | {"rope_scaling": None},
                     "transformer_layer_config"), check_eagle3),
    Layout("EAGLE-3", "speculators 0.9", "layers by number", e3("speculators", top=[2, 3, 4]), check_eagle3),
    Layout("EAGLE-3", "speculators 0.9", "`norm_before_residual`", e3("speculators", **NORM_KEYS),
           partial(check_eagle3, flags=["norm_before_residual"])),
    Layout("EAGLE-3.1", "speculators 0.9", "`fc_norm`, `norm_output`",
           e3("speculators", fc_norm=True, norm_output=True), partial(check_eagle3, flags=["fc_norm", "norm_output"])),
    Layout("EAGLE-3", "speculators 0.9", "sliding window", lambda folder, base: with_keys(
        folder, base, e3("speculators"), near(NEAR), "transformer_layer_config"
    ), partial(check_eagle3, windows=[4])),
    Layout("EAGLE-3", "speculators 0.9", "Qwen3's block", lambda folder, base: with_norms(
        folder, base, e3("speculators"), QWEN3_TABLE, "transformer_layer_config"
    ), check_eagle3),
    Layout("EAGLE-3", "SpecForge", "Qwen3's block (`Eagle3Qwen3ForCausalLM`)", lambda folder, base: with_norms(
        folder, base, e3("vllm"), {"architectures": ["Eagle3Qwen3ForCausalLM"], **QWEN3_TABLE}
    ), check_eagle3),
    Layout("EAGLE-3", "SpecForge", "own trained embeddings", lambda folder, base: foreign.eagle3(
        folder, "vllm", embed=foreign.Random(19)(97, 32, scale=1.0), embed_requires_grad=True
    ), check_eagle3),
    Layout("EAGLE-3", "SGLang's older keys", "`use_aux_norm`, `aux_norm_low/mid/high`", lambda folder, base: renamed(
        folder, base, e3("vllm", fc_norm=True, use_aux_norm=True),
        lambda n: re.sub(r"fc_norm\.(\d)", lambda m: f"aux_norm_{('low', 'mid', 'high')[int(m[1])]}", n),
        {"fc_norm": False},
    ), partial(check_eagle3, flags=["fc_norm"])),
    Layout("EAGLE-3", "for Gemma, Qwen3.5", "gelu (tanh), half of each head rotated",
           e3("vllm", hidden_act="gelu_pytorch_tanh", partial_rotary_factor=0.5), partial(
               check_eagle3, rope=foreign_rope.PARTIAL, act=partial(torch.nn.functional.gelu, approximate="tanh"))),
    *[Layout("EAGLE-3", "for vLLM, SGLang", f"`{kind}` positions", e3("vllm", rope_scaling={
        k: v for k, v in foreign_rope.SCALED[kind].items() if k != "rope_theta"
    }), partial(check_eagle3, rope=foreign_rope.SCALED[kind])) for kind in ("linear", "llama3", "yarn")],
    Layout("EAGLE-3", "for vLLM", "biases of attention", lambda folder, base: with_biases(
        folder, base, e3("vllm", attention_bias=True)
    ), check_eagle3),
    Layout("EAGLE-3", "NeMo Automodel", "names begin with `model.`", lambda folder, base: renamed(
        folder, base, e3("vllm"), lambda n: n if n in ("lm_head.weight", "d2t", "t2d") else f"model.{n}"
    ), check_eagle3),
    Layout("EAGLE-3", "ModelOpt", "from a Hugging Face model", e3("modelopt"), check_eagle3),
    Layout("EAGLE-3", "ModelOpt", "from Megatron, no `lm_head`", alone(foreign_modelopt.megatron), check_eagle3),
    Layout("EAGLE-3", "ModelOpt", "from Megatron, three blocks", lambda folder, base: foreign_modelopt.megatron(
        folder, draft=40, layers=3
    ), partial(check_eagle3, later=["midlayer.1.", "midlayer.2."])),
    Layout("EAGLE-3", "NVIDIA", "gpt-oss, last layer read, `norm_before_fc`",
           e3("modelopt", draft=97, nested=[4, 6, 8], norm_before_fc=True), base=gpt_oss),
    Layout("EAGLE-3", "NVIDIA", "`use_aux_hidden_state: false` (short context, throughput)", lambda folder, base:
           foreign_modelopt.megatron(folder, inner={"use_aux_hidden_state": False})),
    Layout("EAGLE-3", "SpecForge", "`model_type: phi3`", e3("specforge", model_type="phi3")),
    Layout("EAGLE-3", "for SGLang, vLLM", "FP8 weights", alone(foreign_others.quantised_eagle3)),
    Layout("EAGLE-3", "for vLLM", "latent attention (Kimi-K2.5, DeepSeek-V3)", alone(foreign_others.mla_eagle3),
           check_eagle3),
    Layout("EAGLE-3", "for vLLM", "latent attention, queries from the whole input, `yarn` positions",
           alone(foreign_others.mla_eagle3, None, foreign_rope.SCALED["yarn with mscale"]),
           partial(check_eagle3, rope=foreign_rope.SCALED["yarn with mscale"])),
    Layout("EAGLE-3", "llama.cpp", "GGUF", alone(foreign_others.gguf)),
    *[Layout("P-EAGLE", writer, options, partial(
        lambda folder, base, form, **more: foreign.peagle(folder, form, **more), form=form, **more
    ), check) for form, writer, options, more, check in (
        ("speculators", "speculators 0.9", "two blocks", {}, check_peagle),
        ("vllm", "for vLLM (Amazon)", "`ptd_token_id`, four blocks", {"layers": 4}, partial(check_peagle, layers=4)),
        ("automodel", "NeMo Automodel", "names begin with `model.`", {}, check_peagle),
        ("specforge", "SpecForge", "`mask_token_id` not in its config", {}, None))],
]  # fmt: skip
DEPTHS = [
    *[Layout("Medusa-1", "FasterDecoding", options, partial(
        lambda folder, base, **more: foreign_depths.medusa(folder, **more), **more), check_medusa)
      for options, more in (("pickle, its config counts 2 of 3 heads", {"form": "v1"}),
                            ("version 2, without output matrices", {"form": "v2"}))],
    Layout("Medusa-2", "FasterDecoding", "heads inside the model", foreign_others.medusa_2),
    Layout("Medusa", "for TensorRT-LLM", "two layers", lambda folder, base: foreign_depths.medusa(
        folder, "trtllm", layers=2), partial(check_medusa, layers=2)),
    Layout("Medusa", "for vLLM", "some tokens", lambda folder, base: foreign_depths.medusa(
        folder, "vllm", draft=40), check_medusa),
    Layout("Medusa", "for vLLM", "one output matrix, no biases", lambda folder, base: foreign_depths.medusa(
        folder, "vllm", shared=True, biased=False), check_medusa),
    Layout("Hydra", "Hydra repository", "`mlp`", lambda folder, base: foreign_depths.hydra(folder), check_hydra),
    Layout("Hydra++", "Hydra repository", "`prefix-mlp`", lambda folder, base: foreign_depths.hydra(
        folder, True, base=base), partial(check_hydra, prefix=True)),
    Layout("Hydra", "Hydra repository", "`eagle-attn`", lambda folder, base: foreign_depths.hydra(
        folder, hydra_head_arch="eagle-attn")),
]  # fmt: skip


def block(head, writer, options, form, more=None, **check):
    return Layout(head, writer, options, block_head(form, **(more or {})), partial(check_block, form=form, **check))


BLOCKS = [
    block("DFlash", "z-lab", "", "z-lab"),
    block("DFlash", "z-lab", "sliding and full layers", "z-lab", near(NEAR, FULL), windows=[4, None],
          causal=(True, False)),
    block("DFlash", "MiMo", "`use_swa`", "z-lab",
          {"layer_types": None, "inner": {"use_swa": True, "swa_window_size": 5}}, windows=[5, 5],
          causal=(False, False)),
    block("DFlash", "ModelOpt", "", "modelopt"),
    Layout("DFlash", "for vLLM, SGLang", "`mask_embedding.pt`", partial(with_mask, form="z-lab"),
           partial(check_block, form="z-lab", embed=masked)),
    block("DFlash", "speculators 0.9", "draft vocabulary", "dflash", {"draft": 40}),
    block("DFlash", "speculators 0.9", "`sample_from_anchor`", "dflash", {"sample_from_anchor": True},
          predicts_next=True),
    block("JetSpec", "JetSpec", "", "jetspec"),
    block("DFlash 2", "z-lab", "", "dflash2"),
    block("DFlash 2", "speculators 0.9", "", "dflash2-sp"),
    block("DSpark", "DeepSpec", "", "deepspec"),
    block("DSpark", "speculators 0.9", "draft vocabulary", "dspark", {"draft": 40}),
    block("DSpark", "speculators 0.9", "gated", "dspark", {"markov": "gated"}),
    block("DSpark", "SpecForge", "recurrent", "specforge", {"markov": "rnn"}),
    block("DSpark", "SpecForge", "prepared for SGLang", "normalised"),
    block("Domino", "SpecForge", "", "domino"),
    Layout("DSpine", "DSpine", "", alone(foreign_others.dspine)),
]  # fmt: skip
MTP = [
    *[Layout("MTP", target, options, partial(module, family=family),
             partial(check_module, family=family) if family in (*BY_TRANSFORMERS, *PLAIN) else None, None)
      for family, target, options in (
          ("deepseek_v3", "DeepSeek-V3", "one module"), ("deepseek_v3, three modules", "DeepSeek-V3", "three modules"),
          ("glm4_moe", "GLM-4.5", ""), ("exaone_moe", "EXAONE-MoE", ""), ("mimo", "MiMo-7B", "two modules"),
          ("ernie4_5", "ERNIE 4.5", ""), ("qwen3_next", "Qwen3-Next", ""), ("qwen3_5", "Qwen3.5", ""),
          ("nemotron_h", "Nemotron-H", ""))],
    *[Layout("MTP", target, "", partial(odd_module, name=name), base=None) for target, name in (
        ("Step", "model.layers.3.transformer.shared_head.norm.weight"), ("DeepSeek-V4", "mtp.0.e_proj.weight"),
        ("LongCat", "model.mtp.layers.0.transformer_layer.mlp.down_proj.weight"),
        ("MiMo-V2", "model.mtp.layers.0.pre_mlp_layernorm.weight"),
        ("Inkling", "mtp.layers.0.transformer_block.mlp.weight"))],
    *[Layout("MTP", "speculators 0.9", f"{target}'s module in a file of its own",
             alone(shipped_mtp.write_apart, family), base=None)
      for family, target in (("qwen3_next", "Qwen3-Next"), ("qwen3_5", "Qwen3.5"))],
]  # fmt: skip
OTHERS = [
    Layout(head, writer, "", alone(write)) for head, writer, write in (
        ("PARD", "AMD", foreign_others.pard), ("Assistant", "Gemma 4", foreign_others.gemma4_assistant),
        ("Assistant", "Muse Glimmer", foreign_others.muse_glimmer_assistant),
        ("MLPSpeculator", "IBM", foreign_others.mlp_speculator), ("LSTM speculator", "Arctic", foreign_others.arctic),
        ("ReDrafter", "Apple", foreign_others.redrafter))
]  # fmt: skip
LAYOUTS = [*EAGLE1, *EAGLE3, *DEPTHS, *BLOCKS, *MTP, *OTHERS]


# --- What happens ---


@functools.cache
def base_of(make):
    return make()


def outcome(layout: Layout, folder: Path) -> tuple[str, str]:
    """EQUAL, TEXT or "refused: why"; and the engines that it can be written for again. AssertionError if the head loads
    and drafts otherwise than its own forward, or is another one after it was written and read."""
    base = None if layout.base is None else base_of(layout.base)
    tensors = layout.build(folder, base)
    try:
        model = SpecModel.from_pretrained(folder, **({} if base is None else {"base": base}), allow_pickle=True)
    except CheckpointError as error:
        return f"refused: {str(error).removeprefix(str(folder)).removeprefix('/config.json').lstrip(': ')}", "–"
    engines = ", ".join(written_for(model, folder)) or "–"
    if layout.check is not None:
        layout.check(model, model.base, tensors, folder)
        return EQUAL, engines
    prompt, options = torch.tensor([PROMPTS[2]]), {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), model.base.generate(prompt, **options))
    return TEXT, engines


def written_for(model: SpecModel, folder: Path) -> list[str]:
    """The engines whose formats hold the head, each written and read again: the same options and the same tensors."""
    engines = engines_for(model.config, model.base, model.head)
    for engine in engines:
        path = model.export(folder.parent / engine, engine)
        again = SpecModel.from_pretrained(path, base=model.base, allow_pickle=True)
        assert again.head.config == model.head.config, (engine, again.head.config, model.head.config)
        state, wanted = again.head.state_dict(), model.head.state_dict()
        assert state.keys() == wanted.keys(), (engine, state.keys() ^ wanted.keys())
        assert all(torch.equal(state[name], wanted[name]) for name in wanted), engine
    return engines


def row(layout: Layout, here: str, engines: str) -> str:
    return f"| {layout.head} | {layout.writer} | {layout.options or '–'} | {here} | {engines} |"


def table() -> list[str]:
    lines = ["| head | written by, or of | layout | here | written again for |", "|---|---|---|---|---|"]
    for i, layout in enumerate(LAYOUTS):
        with tempfile.TemporaryDirectory() as folder:
            try:
                lines.append(row(layout, *outcome(layout, Path(folder) / str(i))))
            except Exception as error:
                raise RuntimeError(f"{layout.head}, {layout.writer}, {layout.options}") from error
    return lines


def in_docs() -> list[str]:
    """The lines of the table in docs/compatibility.md."""
    return [line for line in PAGE.read_text("utf8").partition(HEADING)[2].partition("\n#")[0].splitlines()
            if line.startswith("|")]  # fmt: skip


if __name__ == "__main__":
    hf_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    made = table()
    if "--write" in sys.argv:
        text = PAGE.read_text("utf8")
        PAGE.write_text(text.replace("\n".join(in_docs()), "\n".join(made)))
    else:
        print("\n".join(made))
