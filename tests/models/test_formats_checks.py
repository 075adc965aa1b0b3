"""Claims about `--check`: it compares what transformers reads of an export with the head."""

from __future__ import annotations

import json

import pytest
import transformers
from safetensors.torch import load_file

from specheads import CheckpointError
from specheads.models import export_checks
from tests.reference.foreign_rope import SCALED
from tests.support.heads_on_disk import trained

LLAMA3 = SCALED["llama3"]


@pytest.fixture(scope="module")
def scaled(base):
    return trained(base, "eagle3", draft_vocab_size=40, taps=(1, 3, 6), rope_parameters=LLAMA3)


def test_a_config_that_transformers_does_not_read_is_not_checked(base, tmp_path):
    model = trained(base, "medusa")
    model.export(tmp_path / "out", "medusa")
    assert export_checks.check(tmp_path / "out", model).startswith("not checked: transformers reads no such config")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"intermediate_size": 52}, r"reads of .* intermediate_size as 52, not 48"),
        ({"rope_scaling": {**LLAMA3, "factor": 2.0}}, "rope_parameters as .*'factor': 2.0.*, not .*'factor': 8.0"),
        ({"rope_theta": 400.0}, "rope_parameters as"),
    ],
)
def test_what_transformers_reads_otherwise_is_an_error(change, said, scaled, tmp_path):
    scaled.export(tmp_path / "out", "sglang")
    assert export_checks.check(tmp_path / "out", scaled) == (
        f"transformers {transformers.__version__} reads its config as the head's: 12 sizes, "
        "rotary positions up to 1,023"
    )
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=said):
        export_checks.check(tmp_path / "out", scaled)


def test_a_changed_file_is_seen(scaled, tmp_path):
    folder = scaled.export(tmp_path / "out", "sglang")
    tensors = load_file(folder / "model.safetensors")
    assert export_checks.compare_tensors("it", folder, tensors) == len(tensors)
    tensors["fc.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"it did not read fc\.weight of"):
        export_checks.compare_tensors("it", folder, tensors)
    assert export_checks.positions_below(70).tolist() == [*range(66)]
