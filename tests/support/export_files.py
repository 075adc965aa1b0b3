"""Heads that are exported in tests, and what is in the files."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file

from specheads import SpecModel
from specheads.models.formats import FORMATS
from tests.reference import foreign
from tests.support.heads_on_disk import trained

SIZES = {
    "num_attention_heads": foreign.HEADS, "num_key_value_heads": foreign.KV_HEADS, "head_dim": foreign.HEAD_DIM,
    "intermediate_size": foreign.INNER, "rms_norm_eps": foreign.EPS, "rope_theta": foreign.THETA,
}  # fmt: skip
# Of the others test_formats_blocks.py and test_mtp_shipped.py say the same.
FORMS = list(dict.fromkeys((form.engine, form.kind) for form in FORMATS if form.kind not in ("parallel", "mtp")))
EAGLE3 = [engine for engine, kind in FORMS if kind == "eagle3"]
CUSTOM = (1, 3, 6)  # layers other than the usual 2, 4, 5 of a base with 8


def made(base, kind, **options):
    """A head of that kind with random weights at a scale that keeps its logits near 1."""
    sizes = SIZES if kind in ("eagle", "eagle3", "parallel") else {}
    model = trained(base, kind, **{**sizes, **options})
    with torch.no_grad():
        for name, parameter in model.head.named_parameters():
            parameter.mul_(0.3).add_(1.0 if "norm" in name else 0.0)
    return model


USUAL = {"eagle3": {"draft_vocab_size": 40}, "medusa": {"num_heads": 3}, "hydra": {"num_layers": 2}, "eagle": {}}


def imported(folder, base):
    return SpecModel.from_pretrained(folder, base=base, dtype="auto", allow_pickle=True)


def tensors_in(folder):
    pickles = [path for path in folder.iterdir() if path.suffix in (".pt", ".bin")]
    if pickles:
        return torch.load(pickles[0], weights_only=True)
    return load_file(next(path for path in folder.iterdir() if path.suffix == ".safetensors"))


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(t, other[n]) and t.dtype == other[n].dtype for n, t in one.items()
    )


def config_of(model, to, folder):
    model.export(folder, to)
    return json.loads((folder / "config.json").read_text())


def assert_comes_back(model, to, base, tmp_path):
    """Bit for bit through export and import, and the files through import and export."""
    model.export(tmp_path / "a", to)
    again = imported(tmp_path / "a", base)
    assert same(again.head_state_dict(), model.head_state_dict())
    training = {
        name: getattr(model.head.config, name)
        for name in ("steps", "decay", "noise")
        if hasattr(model.head.config, name)
    }
    assert replace(again.head.config, **training) == model.head.config
    again.export(tmp_path / "b", to)
    for path in (tmp_path / "a").iterdir():
        if path.name not in ("README.md", "trtllm.yml") and path.suffix != ".pt":
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert same(tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b"))
