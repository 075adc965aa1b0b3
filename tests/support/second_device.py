"""A device of torch's made in Python, whose tensors lie on the CPU: it refuses what an accelerator would.

Operations take tensors of one device, but for single numbers; a tensor on the CPU is not indexed by one on the device,
and numpy reads none of those. The device is there once this is imported, for the rest of the process.
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
MOVING = ("copy_", "_to_copy", "to.")


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
        raise TypeError(f"numpy reads no tensor on {DEVICE}")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with torch.inference_mode(False), torch.no_grad():
            return run(function, args, kwargs or {})


def host(value):
    """What is on the device, on the CPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.host if isinstance(value, OnDevice) else value


def refuse_other_devices(name, tensors):
    """RuntimeError if an operation takes tensors of both devices, and these are."""
    devices = dict.fromkeys(each.device for each in tensors if each.dim())
    if name.startswith(INDEXING):  # indices on the CPU are moved to what they index
        devices = {device: None for device in devices if device.type != "cpu" or tensors[0].device == device}
    if len(devices) > 1:
        raise RuntimeError(f"{name}: tensors are on {' and '.join(map(str, devices))}")


def run(function, args, kwargs):
    """An operation on tensors of which one is on the device."""
    name = str(function).removeprefix("aten.")
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not name.startswith(MOVING):
        refuse_other_devices(name, tensors)
    device = max(tensors, key=lambda each: each.dim() > 0).device
    if name.startswith("to.other"):
        device = tensors[1].device
    elif not name.startswith("copy_"):
        device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), device)
    result = function(*tree_map(host, args), **tree_map(host, kwargs))
    given = {id(host(each)): each for each in tensors}

    def wrapped(value):
        if not isinstance(value, torch.Tensor):
            return value
        if (same := given.get(id(value))) is not None:
            if same.device == device:
                return same
            value = value.clone()  # moved
        return value if device.type == "cpu" else OnDevice(value)

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


def place(module):
    """Put the tensors of a module on the device. Parameters keep whether they are trained."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = torch.nn.Parameter(OnDevice(parameter.detach()), parameter.requires_grad)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = OnDevice(buffer)


def on_device(value):
    """A tensor, or a copy of a module, on the device."""
    if isinstance(value, torch.Tensor):
        return OnDevice(value)
    copied = copy.deepcopy(value)
    place(copied)
    return copied
