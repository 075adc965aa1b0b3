"""Claims about heads with sliding windows, in and out: they draft what their own forward says, they come back bit for
bit, and what a config leaves open or a format cannot hold is refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from specheads import CheckpointError, SpecModel
from tests.reference import foreign, foreign_blocks
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.export_files import assert_comes_back, made, tensors_in
from tests.support.tiny_models import tiny_llama

FULL, NEAR = "full_attention", "sliding_attention"
W = 4  # the texts of assert_drafts are 9 tokens and more, up to 4 windows


def windows(*kinds, size=W):
    return {"layer_types": list(kinds), "sliding_window": size, "use_sliding_window": True}


def edited(folder, keys, table=""):
    """The folder, whose config has these keys too."""
    config = json.loads((folder / "config.json").read_text())
    (config[table] if table else config).update(keys)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_windowed(model, base, tensors, form, sizes, causal=()):
    """The head drafts as the plain forward with windows of these sizes does, and not as the one without."""
    prefix, *later = [f"layers.{i}." for i in range(len(sizes))]
    layers = model.head.layers

    def forward(sizes):
        if form == "eagle":
            return lambda s, t, d: foreign.eagle3_logits(
                tensors, prefix, s, layers, embeddings(base), t, d, later=later, windows=sizes,
                flags=["norm_before_residual"] * model.head.config.norm_before_residual,
            )  # fmt: skip
        lm_head = base.get_output_embeddings().weight.detach()
        return lambda s, t, d: foreign_blocks.logits(
            tensors, form, s, embeddings(base), lm_head, t, d, windows=sizes, causal=causal
        )

    ids = torch.arange(40) + tensors["d2t"] if "d2t" in tensors else None
    assert_drafts(model, forward(sizes), ids)
    with pytest.raises(AssertionError, match="close"):
        assert_drafts(model, forward([None] * len(sizes)), ids)


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_an_eagle3_head_drafts_within_its_window(form, base, tmp_path):
    tensors = foreign.eagle3(tmp_path, form)
    edited(tmp_path, windows(NEAR), "transformer_layer_config" if form == "speculators" else "")
    assert_windowed(SpecModel.from_pretrained(tmp_path, base=base), base, tensors, "eagle", [W])


BOTH_WAYS, EARLIER = (False, False), (True, True)
BLOCKS = {  # the form, what its config says, and by layer the windows and whether slots are causal
    "z-lab, nothing said": ("z-lab", windows(NEAR, FULL), [W, None], (True, False)),
    "z-lab, all both ways": ("z-lab", windows(NEAR, NEAR) | {"is_causal": False}, [W, W], BOTH_WAYS),
    "z-lab, all causal": ("z-lab", windows(FULL, NEAR) | {"is_causal": True}, [None, W], EARLIER),
    "MiMo's keys": ("z-lab", {"layer_types": None, "use_swa": True, "swa_window_size": 5}, [5, 5], BOTH_WAYS),
    "MiMo's window is taken before transformers'": (
        "z-lab", windows(NEAR, FULL, size=6) | {"use_swa": True, "swa_window_size": 5}, [5, None], (True, False)
    ),
    "speculators": ("dflash", windows(FULL, NEAR), [None, W], (False, True)),
    "speculators, both ways": ("dflash", windows(NEAR, NEAR) | {"sliding_window_non_causal": True}, [W, W], BOTH_WAYS),
    "DSpark of speculators": ("dspark", windows(NEAR, NEAR), [W, W], EARLIER),
    "DeepSpec": ("deepspec", windows(NEAR, FULL), [W, None], (True, False)),
    "SpecForge": ("specforge", windows(NEAR, NEAR), [W, W], EARLIER),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_a_head_that_drafts_a_block_has_windows_where_its_config_says(case, base, tmp_path):
    form, keys, sizes, causal = BLOCKS[case]
    tensors = foreign_blocks.head(tmp_path, form, base=base)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, value in keys.items():
        swa = name in ("use_swa", "swa_window_size")
        nested = "transformer_layer_config" in config and name != "sliding_window_non_causal"
        table = config["dflash_config"] if swa else config["transformer_layer_config"] if nested else config
        table[name] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_windowed(SpecModel.from_pretrained(tmp_path, base=base), base, tensors, form, sizes, causal)


MIXED = {"sliding_window": W, "layer_types": (FULL, NEAR), "num_layers": 2}
DFLASH = {
    "causal": False, "mask_token_id": 9, "block_size": 4, "draft_depth": 4, "taps": (1, 4, 6), "markov_rank": 0,
    "sample_from_anchor": False, "sliding_window": W,
}  # fmt: skip
DSPARK = {**DFLASH, "markov_rank": 6, "sample_from_anchor": True, "causal_windows": True}
OUT = [
    *[(to, "eagle3", {"draft_vocab_size": 40, "sliding_window": W}) for to in ("vllm", "speculators", "sglang")],
    *[(to, "eagle3", {"draft_vocab_size": 40, **MIXED}) for to in ("vllm", "speculators")],
    *[(to, "parallel", DFLASH) for to in ("dflash", "vllm", "sglang", "llamacpp", "speculators")],
    *[(to, "parallel", {**DFLASH, "causal": True}) for to in ("vllm", "sglang", "llamacpp")],
    *[(to, "parallel", {**DFLASH, **MIXED, "causal_windows": True}) for to in ("dflash", "vllm", "sglang")],
    ("vllm", "parallel", {**DFLASH, **MIXED, "causal": True}),
    ("speculators", "parallel", {**DFLASH, "causal_windows": True}),
    ("speculators", "parallel", {**DFLASH, **MIXED, "causal_windows": True}),  # as DSpark, see parts/windows.py
    ("speculators", "parallel", {**DSPARK, **MIXED}), ("vllm", "parallel", {**DSPARK, **MIXED}),
    ("sglang", "parallel", {**DSPARK, "causal": True, "causal_windows": None}),
]  # fmt: skip


@pytest.mark.parametrize(("to", "kind", "options"), OUT)
def test_what_is_written_drafts_by_their_forward_and_comes_back(to, kind, options, base, tmp_path):
    if kind == "eagle3":
        options = {"norm_before_residual": to != "sglang", **options}
    model = made(base, kind, **options)
    assert_comes_back(model, to, base, tmp_path)
    head = model.head.config
    sizes = [head.sliding_window if each == NEAR else None for each in head.layer_types or [NEAR] * head.num_layers]
    form = "eagle" if kind == "eagle3" else "deepspec" if head.markov_rank else "z-lab"
    tensors = tensors_in(tmp_path / "a")
    if kind == "eagle3":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    assert_windowed(model, base, tensors, form, sizes, () if kind == "eagle3" else head.causal_layers)


UNSAID = [
    ({"layer_types": [NEAR], "use_sliding_window": True}, "sliding_window=None; expected a whole number from 1"),
    (windows(NEAR) | {"use_sliding_window": False}, r"layer_types=\['sliding_attention'\] and use_sliding_window=fal"),
    ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window=true, and not which layers"),
    ({"sliding_window": 4}, "sliding_window=4, and not which layers have the window"),
    (windows(NEAR, NEAR), "layer_types=.*; expected full_attention or sliding_attention for each of its 1"),
    (windows("chunked_attention"), "layer_types=.*; expected full_attention or sliding_attention for each of its 1"),
    (windows(FULL), "use_sliding_window=true, and layer_types has no sliding_attention"),
    (windows(NEAR, size=0), "sliding_window=0; expected a whole number from 1"),
    (windows(NEAR, size=2**30), "sliding_window=1073741824 must be at most"),
]
NONE = [
    {"sliding_window": None, "use_sliding_window": False}, {"sliding_window": 4, "use_sliding_window": False},
    {"sliding_window": 4, "layer_types": [FULL]},
]  # fmt: skip


@pytest.mark.parametrize("form", ["vllm", "speculators", "speculators, at the top", "eagle"])
def test_a_config_that_leaves_the_window_open_is_refused_and_one_that_no_layer_has_is_not(form, base, tmp_path):
    kind, _, top = form.partition(",")
    if kind == "eagle":
        foreign.eagle(tmp_path, "vllm", embed=embeddings(base))
    else:
        foreign.eagle3(tmp_path, kind)
    table = "transformer_layer_config" if kind == "speculators" and not top else ""
    before = (tmp_path / "config.json").read_text()
    refused = [*UNSAID[:-1], (windows(NEAR), "beside its decoder's own")] if top else UNSAID
    for keys, message in refused:
        (tmp_path / "config.json").write_text(before)
        with pytest.raises(CheckpointError, match=message):
            SpecModel.from_pretrained(edited(tmp_path, keys, table), base=base)
    for keys in NONE:
        (tmp_path / "config.json").write_text(before)
        assert SpecModel.from_pretrained(edited(tmp_path, keys, table), base=base).head.config.sliding_window is None


def test_speculators_must_say_whether_slots_within_windows_see_later_ones(base, tmp_path):
    foreign_blocks.head(tmp_path, "dflash", sliding_window_non_causal=None)
    with pytest.raises(CheckpointError, match=r"does not say sliding_window_non_causal, which its trainer takes for"):
        SpecModel.from_pretrained(edited(tmp_path, windows(NEAR, FULL), "transformer_layer_config"), base=base)


def test_a_block_larger_than_its_window_is_refused(base, tmp_path):
    foreign_blocks.head(tmp_path, "z-lab", **windows(NEAR, FULL, size=3))
    with pytest.raises(CheckpointError, match="sliding_window=3 and block_size=4: slots of a block see one another"):
        SpecModel.from_pretrained(tmp_path, base=base)


NOT_HELD = [
    *[(to, "eagle3", {}, "windows of 4 positions, which .*: sglang, speculators, vllm$")
      for to in ("eagle", "trtllm", "llamacpp", "modelopt")],
    ("vllm", "eagle", {}, "windows of 4 positions, which its readers do not have; no format can$"),
    ("hydra", "hydra", {"prefix_layer": True}, "windows of 4 positions, which its readers do not have"),
    ("openvino", "parallel", DFLASH, "windows of 4 positions, which .*: dflash, llamacpp, sglang, speculators, vllm$"),
    ("speculators", "parallel", {**DSPARK, "causal_windows": None}, "attend both ways, which its readers cannot be"),
    ("vllm", "parallel", {**DFLASH, **MIXED, "causal": True, "causal_windows": False}, "which no config can say"),
]  # fmt: skip


@pytest.mark.parametrize(("to", "kind", "options", "message"), NOT_HELD)
def test_a_format_whose_readers_have_no_windows_refuses_them(to, kind, options, message, base, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        made(base, kind, **{"sliding_window": W, **options}).export(tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


def test_modules_of_a_target_are_not_written_with_a_window_of_their_own(tmp_path):
    model = made(tiny_llama(), "mtp", sliding_window=W)
    with pytest.raises(CheckpointError, match=r"no such modules|sliding_window=4"):
        model.export(tmp_path / "out", "mtp")
