"""A DFlash head in transformers' own DFlash decoding accepts, step by step, what it accepts here."""

from __future__ import annotations

import pytest
import torch

from specheads import chain
from tests.models.test_formats_blocks import DFLASH, taught
from tests.support.export_files import made, tensors_in
from tests.support.tiny_models import tiny_llama

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "MuseGlimmerAssistantModel"):  # from 5.23 on
    pytest.skip("this transformers has no DFlash decoding", allow_module_level=True)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator  # noqa: E402

RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def assistant(tensors, head):
    """Its own model of a DFlash head, of our exported tensors."""
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=head.hidden_size, intermediate_size=head.intermediate_size, num_hidden_layers=head.num_layers,
        num_attention_heads=head.num_attention_heads, num_key_value_heads=head.num_key_value_heads,
        head_dim=head.head_dim, rms_norm_eps=head.rms_norm_eps, block_size=head.block_size,
        rope_parameters=head.rope_parameters, mask_token_id=head.mask_token_id,
        layer_types=["full_attention"] * head.num_layers, target_layer_ids=[tap - 1 for tap in head.taps],
        max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    model.load_state_dict({RENAMED.get(name, name): t for name, t in tensors.items()}, strict=True)
    return model


def test_transformers_dflash_decoding_accepts_as_much_in_every_step(tmp_path, monkeypatch):
    base = tiny_llama()
    text = base.generate(torch.tensor([[7], [31], [55]]), do_sample=False, max_new_tokens=40, min_new_tokens=40)
    model = made(base, "parallel", **{**DFLASH, "block_size": 6}).train()
    taught(model, text, 60, 2e-2)
    model.eval().export(tmp_path / "out", "dflash")
    accepted, own = [], DFlashTokenCandidateGenerator.get_candidates

    def counted(self, *args, n_last_matches, **kwargs):
        accepted.append(n_last_matches)
        return own(self, *args, n_last_matches=n_last_matches, **kwargs)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", counted)
    options = {"do_sample": False, "max_new_tokens": 38, "eos_token_id": 97, "pad_token_id": 0}
    ids = text[:1, :2]
    theirs = base.generate(
        ids, assistant_model=assistant(tensors_in(tmp_path / "out"), model.head.config), speculation_type="dflash",
        **options,
    )  # fmt: skip
    ours = model.generate(ids, tree=chain(5), return_dict_in_generate=True, **options)
    assert torch.equal(theirs, ours.sequences)
    # Its first two calls stand before anything is drafted, and the last step of both is cut by the limit.
    steps = [step.accepted[0] for step in ours.steps[1:-1]]
    assert accepted[2 : 2 + len(steps)] == steps and max(steps) >= 3 and sum(steps) >= 8
