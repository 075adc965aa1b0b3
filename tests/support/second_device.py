"""A device of torch's made in Python, whose tensors lie on the CPU: it refuses what an accelerator would.

Operations take tensors of one device, but for single numbers; a tensor on the CPU is not indexed by one on the device,
and numpy reads none. It is there once this is imported, for the rest of the process.
"""

import copy

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("second")
DEVICE = torch.device("second", 0)
MAKERS = (
    "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace",
    "randperm", "scalar_tensor", "tril_indices", "triu_indices",
)  # fmt: skip
INDEXING = ("index.Tensor", "index_put", "_index_put_impl_")
OF_BOTH_DEVICES = (*INDEXING, "copy_", "_to_copy")


class OnDevice(torch.Tensor):
    """A tensor on the device; host: where it lies."""

    @staticmethod
    def __new__(cls, host):
        return torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            layout=host.layout, device=DEVICE,
        )  # fmt: skip

    def __init__(self, host):
        self.host = host

    def __repr__(self):
        return f"OnDevice({self.host})"

    def tolist(self):
        return self.host.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("numpy reads no tensor of the second device")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with torch.inference_mode(False), torch.no_grad():
            return run(function, args, kwargs or {})


def host(value):
    """What is on the device, on the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.host if isinstance(value, OnDevice) else value


def run(function, args, kwargs):
    """An operation on tensors of which one is on the device. RuntimeError if others would have to be there too."""
    name = str(function).removeprefix("aten.")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    elsewhere = [each for each in tensors if not isinstance(each, OnDevice) and each.dim()]
    indexed_elsewhere = name.startswith(INDEXING) and not isinstance(args[0], OnDevice)
    if elsewhere and (indexed_elsewhere or not name.startswith(OF_BOTH_DEVICES)):
        raise RuntimeError(f"{name}: a tensor {tuple(elsewhere[0].shape)} is on the CPU, others on {DEVICE}")
    result = function(*tree_map(host, args), **tree_map(host, kwargs))
    on_device = kwargs.get("device") is None or torch.device(kwargs["device"]).type == DEVICE.type
    if name.startswith("copy_"):
        on_device = isinstance(args[0], OnDevice)
    if not on_device:
        return result
    given = {id(each.host): each for each in tensors if isinstance(each, OnDevice)}

    def wrapped(value):
        return given.get(id(value), OnDevice(value)) if isinstance(value, torch.Tensor) else value

    return tree_map(wrapped, result)


def maker(function):
    def make(*args, **kwargs):
        with torch.inference_mode(False):
            return OnDevice(function(*args, **{**kwargs, "device": "cpu"}))

    return make


def copy_from(source, to, non_blocking=False):
    host(to).copy_(host(source))
    return to


library = torch.library.Library("aten", "IMPL")
library.impl("_copy_from", copy_from, "PrivateUse1")
for maker_name in MAKERS:
    packet, _, overload = maker_name.partition(".")
    library.impl(maker_name, maker(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")


def on_device(value):
    """A tensor, or a copy of a module, on the device. Parameters keep whether they are trained."""
    if isinstance(value, torch.Tensor):
        return OnDevice(value)
    copied = copy.deepcopy(value)
    for module in copied.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                tensor = OnDevice(parameter.detach())
                module._parameters[name] = torch.nn.Parameter(tensor, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
    return copied
