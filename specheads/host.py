"""Where Python may look at numbers: reading one costs next to nothing on a CPU, and on a GPU the wait for the device.

Asked as `host.reads(tensor)`, so that one place says it and the other branch can be run on a CPU too.
"""

from torch import Tensor


def reads(values: Tensor) -> bool:
    """May Python read them as it likes?"""
    return values.device.type == "cpu"
