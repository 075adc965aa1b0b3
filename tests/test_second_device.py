"""Models decode and train on a device other than the CPU, one made in Python: no tensor is left behind or read there.

In a process of its own, as the device stays for the rest of it.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch.utils.backend_registration

from tests.reference.slow_heads import KINDS
from tests.support.child_end import DONE, run_to_its_end
from tests.support.paths import ROOT
from tests.support.training_runs import run_module

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no device that is made in Python",
)
CALLS = 8


def succeeds(*command):
    run_to_its_end(run_module, ["tests.support.device_calls", *map(str, command)])


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


@pytest.mark.parametrize(("says", "code"), [(DONE, 0), (DONE, 134), ("half of it", 0), ("half of it", 134)])
def test_a_child_counts_by_what_it_reports_and_not_by_how_it_ends(says, code):
    def start(**environment):
        script = f"import os; print({says!r}, flush=True); os._exit({code})"
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    if says != DONE:
        with pytest.raises(AssertionError, match="half of it"):
            run_to_its_end(start)
    elif code:
        with pytest.warns(UserWarning, match="ended with 134 after its work"):
            run_to_its_end(start)
    else:
        run_to_its_end(start)


@pytest.mark.skipif(not shutil.which("gdb"), reason="needs gdb")
def test_an_abort_after_the_work_is_shown_with_the_stacks_of_the_threads():
    script = "import os; from tests.support.child_end import report_done; report_done(); os.abort()"
    with pytest.warns(UserWarning, match="(?s)ended with -6 after its work.*(abort|no core dump)"):
        run_to_its_end(run_script, script)


def run_script(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
