"""Training under bfloat16 autocast computes its norms in the dtype of their scales, without torch's warning."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from specheads.heads.layers.block import RMSNorm

# In a process of its own: torch warns of it once.
RUN = """
import warnings
warnings.filterwarnings("error", message="Mismatch dtype")
import torch
from specheads.data.batches import Collator
from tests.support.trainers import OPTIONS, model_of, rows
for kind in OPTIONS:
    model, batch = model_of(kind).train(), Collator(0)(list(rows(2)))
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch).loss.backward()
"""


def test_no_head_mixes_dtypes_in_a_norm():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-800:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_its_values_are_torchs_own_in_the_dtype_of_the_input(dtype):
    generator = torch.Generator().manual_seed(0)
    ours, torchs = RMSNorm(16, eps=1e-5), nn.RMSNorm(16, eps=1e-5)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(16, generator=generator))
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 16, generator=generator)
    assert torch.equal(ours(x), torchs(x))
    assert torch.equal(ours(x.to(dtype)), torchs(x.to(dtype).float()).to(dtype))
