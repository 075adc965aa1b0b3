"""What --dtype auto loads."""

import pytest
import torch

from specheads import convert
from specheads.models.base import loading
from specheads.models.named import Models
from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory, shipped):
    """A base of some thousand weights in bfloat16 with a tokenizer, and a head for it in float32."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("saved")
    base = tiny_llama().to(torch.bfloat16)
    base.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(shipped / "base").save_pretrained(folder / "base")
    model = convert(base, "medusa")
    model.head.float()
    model.save_pretrained(folder / "head")
    return folder


@pytest.mark.parametrize(
    ("fast", "large", "dtype", "expected"),
    [
        (True, 1000, "auto", torch.bfloat16),
        (False, 1000, "auto", torch.float32),
        (True, 10**8, "auto", torch.float32),
        (True, 10**8, "bfloat16", torch.bfloat16),
        (True, 1000, "float32", torch.float32),
    ],
)
def test_a_large_base_stays_in_bfloat16_where_the_processor_is_fast_at_it(
    monkeypatch, saved, fast, large, dtype, expected
):
    monkeypatch.setattr(loading, "bfloat16_is_fast", lambda device: fast)
    monkeypatch.setattr(loading, "LARGE", large)
    assert Models.load(str(saved / "base"), dtype=dtype, device="cpu").target.dtype == expected
    models = Models.load(str(saved / "head"), base=str(saved / "base"), dtype=dtype, device="cpu")
    assert models.target.dtype == models.drafters["head"].dtype == expected


def test_a_float32_checkpoint_stays_float32(monkeypatch, saved, tmp_path):
    monkeypatch.setattr(loading, "bfloat16_is_fast", lambda device: True)
    monkeypatch.setattr(loading, "LARGE", 1000)
    base = tiny_llama()
    base.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(saved / "base").save_pretrained(tmp_path)
    assert Models.load(str(tmp_path), device="cpu").target.dtype == torch.float32
