"""Every server reads an exported EAGLE-3 head's own layers, for each family that it numbers in a way of its own; what
it cannot be told is refused; and a file is read as SGLang reads it."""

import logging

import pytest
import torch

from specheads import CheckpointError, SpecModel, convert
from specheads.models.formats import FORMATS
from specheads.models.formats.files import Files
from specheads.models.formats.parts import layer_ids
from tests.reference import foreign, layer_numbers
from tests.support.assert_drafts import IDS, Recorded, embeddings, states
from tests.support.export_files import made, same
from tests.support.families import FAMILIES as BUILT
from tests.support.families import build
from tests.support.tiny_models import tiny_llama

N = 8
FAMILIES = ("llama", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "gemma4_text",
            "minimax_m3_vl", "qwen3_moe")  # fmt: skip
LAST = N + 1  # the tap of the last layer's output
TAPS = [(2, 4, 5), (3, 5, 7), (2, 5, 7), (1, 3, 6), (4, 6, LAST), (1, 2, LAST), (3, 4, 5), (2, 4, LAST), (5, 6, 7)]
READERS = {
    "vllm": [layer_numbers.vllm_on_cpu, layer_numbers.vllm_on_gpu], "sglang": [layer_numbers.sglang],
    "speculators": [layer_numbers.vllm_on_cpu, layer_numbers.vllm_on_gpu], "llamacpp": [layer_numbers.llamacpp],
    "modelopt": [layer_numbers.sglang],
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request):
    """A base of that family by name: all that the rules ask of it."""
    base = tiny_llama()
    base.config.model_type = request.param
    return base


def form_of(to):
    return next(form for form in FORMATS if (form.engine, form.kind) == (to, "eagle3") and "P-EAGLE" not in form.title)


@pytest.mark.parametrize("to", READERS)
def test_every_server_reads_the_layers_that_the_head_reads_or_the_export_is_refused(to, family):
    name, accepted = family.config.model_type, []
    for taps in TAPS:
        model = convert(family, "eagle3", taps=taps, norm_before_residual=False)
        form, wanted = form_of(to), [N if tap == LAST else tap for tap in taps]
        tensors = model.head.state_dict()
        if wrong := form.refusals(model.head.config, tensors, family):
            expected = (
                to == "llamacpp" and name not in layer_ids.LLAMACPP_FAMILIES,
                LAST in taps and to == "modelopt",
                LAST in taps and to == "sglang" and name not in ("gpt_oss", "gemma4_text", "minimax_m3_vl"),
                LAST in taps and to == "llamacpp" and name != "gpt_oss",
                taps[0] == 1 and to in ("sglang", "modelopt") and name in FAMILIES[1:6],
            )
            assert any(expected), (taps, wrong)
            continue
        accepted.append(taps)
        written = form.write(model.head.config, tensors, family)
        for read in READERS[to]:
            assert read(written.config, N, name) == wanted, (read.__name__, taps)
        assert layer_ids.read_taps(Files("here"), written.config, family) == taps
        if to == "modelopt":
            assert layer_numbers.trtllm(written.texts["trtllm.yml"], N) == wanted
    assert accepted or to == "llamacpp"


def test_tensorrt_llm_reads_them_in_its_options(family):
    for taps in TAPS:
        model, form = convert(family, "eagle3", taps=taps, norm_before_residual=False), form_of("trtllm")
        wrong = form.refusals(model.head.config, model.head.state_dict(), family)
        assert bool(wrong) == (LAST in taps)
        if not wrong:
            text = form.write(model.head.config, model.head.state_dict(), family).texts["trtllm.yml"]
            assert layer_numbers.trtllm(text, N) == list(taps)


@pytest.mark.parametrize("ids", [[1, 3, 4], [2, 4, 6], [4, 6, 8], [3, 5, 7], [1, 4, 7], [1, 2, 8]])
def test_nested_layers_are_read_as_sglang_reads_them_and_the_log_says_where_vllm_differs(ids, family, caplog):
    config = {"eagle_config": {layer_numbers.NAME: ids}}
    wanted = layer_numbers.sglang(config, 10**6, family.config.model_type)  # which states it wants, captured or not
    if family.config.model_type == "gpt_oss":
        wanted = layer_numbers.sglang(config, N, "gpt_oss")
    with caplog.at_level(logging.WARNING, logger="specheads"):
        if max(wanted) > N:
            with pytest.raises(CheckpointError, match="servers capture only those between two layers"):
                layer_ids.read_taps(Files("here"), config, family)
            return
        taps = layer_ids.read_taps(Files("here"), config, family)
    assert [N if tap == LAST else tap for tap in taps] == wanted
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (wanted != ids)
    if said:
        assert f"as {ids}: read as hidden_states {wanted}, as SGLang does; vLLM 0.32 reads {ids} on a CPU" in said[0]
    caplog.clear()
    assert layer_ids.read_taps(Files("here"), config | {layer_numbers.NAME: wanted}, family) == taps
    assert not caplog.records


def test_a_text_model_in_a_vision_model_counts_as_its_family():
    class Config:
        model_type = "kimi_k25"

        def get_text_config(self, decoder):
            return text

    base = tiny_llama()
    text, base.config = base.config, Config()
    text.model_type = "deepseek_v3"
    assert layer_ids.families(base) == {"kimi_k25", "deepseek_v3"}
    assert layer_ids.sglang_boundaries([2, 4, 6], base) == [2, 4, 6]


# --- nvidia/gpt-oss-120b-Eagle3-v3: nested [24, 30, 36] of 36 layers, norm_before_fc ---


@torch.no_grad()
def test_a_head_for_the_last_boundary_drafts_what_its_own_forward_says(tmp_path):
    """The state after the last layer is taken by a hook of its own here."""
    base = gpt_oss()
    tensors = foreign.eagle3(tmp_path / "head", "modelopt", draft=97, nested=[4, 6, 8], norm_before_fc=True)
    model = SpecModel.from_pretrained(tmp_path / "head", base=base)
    assert model.head.layers == (4, 6, 9) and model.head.config.norm_before_fc
    plan = Recorded(3)
    out = model.generate(IDS, tree=plan, max_new_tokens=8, do_sample=False)[0]
    assert torch.equal(out, base.generate(IDS, max_new_tokens=8, do_sample=False)[0])
    start, levels = IDS.shape[1], plan.drafts[0]
    kept = []
    handle = base.model.layers[-1].register_forward_hook(
        lambda m, a, output: kept.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    fed = states(base, out[:start])
    handle.remove()
    wanted = foreign.eagle3_logits(
        tensors, "layers.0.", [*fed, kept[0][0]], (4, 6, 9), embeddings(base), out[: start + 1],
        [token for token, _, _ in levels[1:]], ("norm_before_fc",),
    )  # fmt: skip
    for (_, logits, _), own in zip(levels, wanted, strict=True):
        torch.testing.assert_close(logits, own, rtol=0, atol=1e-5 * max(1.0, float(own.abs().max())))


def gpt_oss():
    name, options = BUILT["gpt-oss"]
    return build(name, {**options, "num_hidden_layers": N})


@pytest.mark.parametrize("to", ["sglang", "vllm", "speculators", "llamacpp"])
def test_such_a_head_comes_back_from_the_formats_whose_readers_take_it(to, tmp_path):
    base = gpt_oss()
    model = made(base, "eagle3", taps=(4, 6, LAST), norm_before_fc=True, norm_before_residual=False)
    model.export(tmp_path / "out", to)
    again = SpecModel.from_pretrained(tmp_path / "out", base=base, dtype="auto")
    assert again.head.layers == model.head.layers and same(again.head_state_dict(), model.head_state_dict())


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("trtllm", r"last layer's output before the final norm \(tap 9\), not captured there; .*: speculators, vllm$"),
        ("sglang", r"\(tap 9\), not captured there but of gpt_oss, gemma4.*, not of llama; .*: speculators, vllm$"),
        ("llamacpp", r"not captured there but of gpt_oss, not of llama"),
        ("vllm", r"reads hidden_states \[8\], and servers capture only .* before the final norm \(9 here\)"),
    ],
)
def test_a_state_that_a_server_does_not_capture_is_refused(to, message, tmp_path):
    taps = (2, 4, 8) if to == "vllm" else (2, 4, LAST)
    with pytest.raises(CheckpointError, match=message):
        made(tiny_llama(), "eagle3", taps=taps, norm_before_residual=False).export(tmp_path / "out", to)


# --- llama.cpp ---


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_llamacpp_is_refused_for_families_of_which_it_gives_no_layer_inputs(kind, tmp_path):
    block = {"causal": False, "mask_token_id": 9, "sample_from_anchor": kind == "dspark", "draft_vocab_size": 97,
             "markov_rank": 4 if kind == "dspark" else 0, "confidence": False}  # fmt: skip
    head, options = ("eagle3", {}) if kind == "eagle3" else ("parallel", block)
    for family in ("Qwen2", "Gemma-3", "Phi-3", "GLM-4", "DeepSeek-V3"):
        base = build(BUILT[family][0], {**BUILT[family][1], "num_hidden_layers": N})
        with pytest.raises(CheckpointError, match=r"gives no layer inputs of .*serve the head by another program"):
            convert(base, head, **options).export(tmp_path / "out", "llamacpp")
    for family in ("Llama", "Mistral", "Qwen3", "Qwen3-MoE"):
        base = build(BUILT[family][0], {**BUILT[family][1], "num_hidden_layers": N})
        convert(base, head, **options).export(tmp_path / family, "llamacpp")
