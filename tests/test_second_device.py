"""Models decode and train on a device other than the CPU, one made in Python: no tensor is left behind or read there.

In a process of its own, as the device stays for the rest of it.
"""

import pytest
import torch.utils.backend_registration

from tests.reference.slow_heads import KINDS
from tests.support.training_runs import run_module

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no device that is made in Python",
)
CALLS = 8


def succeeds(*command):
    done = run_module(["tests.support.device_calls", *map(str, command)])
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("first", range(0, 200, CALLS))
@pytest.mark.sampled(25)
def test_calls_drawn_at_random_have_the_text_of_the_cpu(first):
    succeeds("decode", first, first + CALLS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
def test_a_base_spread_over_devices_has_the_text_and_gradients_of_the_cpu(kind):
    succeeds("spread", kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
def test_heads_have_the_gradients_of_the_cpu(kind):
    succeeds("train", kind)
