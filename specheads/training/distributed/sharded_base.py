"""A base that FSDP2 or ZeRO-3 shards: the first process alone loads it, and sends the others their shards.

The others build the same model without weights, on the meta device. `send_head` gives every process the head, the
adapters and the buffers. The frozen weights follow when accelerate prepares the model, one tensor at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)

from specheads.training.distributed.launch import from_environment, kind_of


def first_loads(arguments: Any) -> bool:
    """Does the first process alone load the base? Under ZeRO-3, and under FSDP2 if it is to load efficiently
    (cpu_ram_efficient_loading), without which accelerate shards what each process has loaded."""
    # Not what transformers says of ZeRO-3, which `unsharded` changes for a time.
    if (plugin := arguments.deepspeed_plugin) is not None:
        return plugin.hf_ds_config.is_zero3()
    if (options := arguments.fsdp_plugin_args) is not None:
        return options["fsdp_version"] == 2 and options["cpu_ram_efficient_loading"]
    efficient = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true"
    return efficient and from_environment(os.environ).distributed == "fsdp2"


@contextlib.contextmanager
def unsharded(arguments: Any) -> Iterator[None]:
    """In the block models have their whole shapes, since a head starts from the base's layers.

    transformers loads shards whenever ZeRO-3 is configured, whatever accelerate's zero3_init_flag says.
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        assert arguments.deepspeed_plugin is not None
        set_hf_deepspeed_config(arguments.deepspeed_plugin.hf_ds_config)


def send_head(model: Any, device: torch.device) -> None:
    """Make everything but the base's frozen weights equal to the first process's and put it on `device`. model: a
    SpecModel, the same on every process but for weights on the meta device."""
    model.config.base_fingerprint = broadcast_object_list([model.config.base_fingerprint])[0]
    frozen = {p for p in model.base.parameters() if not p.requires_grad}
    sent: dict[Tensor, Tensor] = {}  # a tensor may have several names
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor in frozen:
                    continue
                if tensor not in sent:
                    sent[tensor] = _sent(tensor, device)
                tensors[name] = sent[tensor]


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The first process's tensor, on `device`, in place of `tensor`: a parameter if that is one."""
    values = allocated(tensor, device).detach().contiguous()
    if torch.distributed.is_initialized():
        torch.distributed.broadcast(values.view(-1).view(torch.uint8), 0)  # backends do not know every dtype
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def allocated(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; memory of its size for one on the meta device."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def patch_prepare(accelerator: Any) -> None:
    """Make accelerate (1.15) send the weights of a model that only the first process has, whatever its buffers, under
    ZeRO-3 too."""
    prepare = accelerator.prepare

    def prepare_sharded(*args: Any, **options: Any) -> Any:
        kind = kind_of(accelerator)
        with contextlib.ExitStack() as stack:
            for model in (each for each in args if isinstance(each, nn.Module)):
                if kind == "fsdp2":
                    stack.enter_context(_buffers_left_out(model))
                elif kind == "zero3":
                    stack.enter_context(_partitioned_first(accelerator.device))
            return prepare(*args, **options)

    accelerator.prepare = prepare_sharded


@contextlib.contextmanager
def _buffers_left_out(model: nn.Module) -> Iterator[None]:
    """In the block the state dict has no buffers: accelerate takes all it finds there for sharded parameters. It moves
    those that are in no state dict to the device by itself."""
    kept = {
        module: module._buffers.keys() - module._non_persistent_buffers_set
        for module in model.modules() if module._buffers
    }  # fmt: skip
    for module, names in kept.items():
        module._non_persistent_buffers_set |= names
    try:
        yield
    finally:
        for module, names in kept.items():
            module._non_persistent_buffers_set -= names


@contextlib.contextmanager
def _partitioned_first(device: torch.device) -> Iterator[None]:
    """In the block DeepSpeed gets a model that `partition` has partitioned; by itself it would first move all of it to
    the device."""
    import deepspeed

    initialize = deepspeed.initialize

    def initialize_partitioned(*args: Any, model: nn.Module, config_params: Any, **options: Any) -> Any:
        partition(model, config_params, device)
        return initialize(*args, model=model, config_params=config_params, **options)

    deepspeed.initialize = initialize_partitioned
    try:
        yield
    finally:
        deepspeed.initialize = initialize


def partition(model: nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Give each process its part of every parameter of the first process's model, one parameter at a time, in the dtype
    of DeepSpeed's config."""
    from deepspeed import init_distributed, zero

    init_distributed()  # zero.Init reads the config before it does so, and would take this for a run of one process
    enabled = (dtype for name, dtype in _DTYPES.items() if config.get(name, {}).get("enabled") is True)
    dtype, first = next(enabled, None), cast(Any, None)
    parts: dict[Tensor, nn.Parameter] = {}  # a parameter may have several names
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
        for name, whole in module._parameters.items():
            if whole is None or hasattr(whole, "ds_id"):  # partitioned already
                continue
            if whole not in parts:
                part = nn.Parameter(allocated(whole, device), whole.requires_grad) if whole.is_meta else whole
                part.data = part.data.to(device, dtype if part.is_floating_point() else None)
                if first is None:
                    first = part
                    zero.Init(module=nn.ParameterList([part]), config_dict_or_path=config)
                else:
                    first.convert_to_zero_parameters(param_list=[part])
                parts[whole] = part
            module._parameters[name] = parts[whole]


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
