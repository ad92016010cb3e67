"""Layers that accelerate offloads: their weights lie on a disk or in a dict, and a hook brings them in for each call.

Where the CPU computes such a Linear, its weight is quantized from the place that the hook reads. What is put in holds
the packed weight in memory and needs no hook. The Linear stays as it is, with its hook, for unpatch().
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import Tensor, nn

from ..errors import HfAccelError

NOTE = "read from where accelerate offloads it, and in memory from then on"
MOVED = "is moved between devices by accelerate"


def is_offloaded(module: nn.Module) -> bool:
    """Return whether the weight is brought in by a hook of the module, and not in memory between calls."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.device.type == "meta" and "_hf_hook" in vars(module)


def brings_in(module: nn.Module) -> bool:
    """Return whether hooks of accelerate bring the module's own parameters to the CPU for each call."""
    return any(
        type(hook) is AlignDevicesHook and hook.offload and _is_cpu(hook.execution_device)
        for hook in _hooks(vars(module).get("_hf_hook"))
    )


def hook_refusal(module: nn.Module, model: nn.Module) -> str | None:
    """Return why a Linear of a model must stay because of a hook of accelerate, as one clause; None if it need not.

    Known is one hook that takes inputs to the CPU, where they are if no part of the model is elsewhere, and brings the
    weights there; and under it the forward of the module's class.
    """
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None:
        return None
    if type(hook) is not AlignDevicesHook or hook.io_same_device or not _is_cpu(hook.execution_device):
        return MOVED
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if not places <= {"cpu", "disk"}:
        return MOVED  # its inputs may come from another device
    if not _calls_the_class(module):
        return "has a forward of its own under a hook of accelerate"
    on_meta = {parameter.device.type == "meta" for parameter in module._parameters.values() if parameter is not None}
    if on_meta != {bool(hook.offload)} or (hook.offload and hook.weights_map is None):
        return MOVED
    return None


def read_offloaded(module: nn.Module, name: str) -> Tensor:
    """Return an offloaded parameter as the hook of its module would bring it in.

    name: of the parameter in the model. Raises HfAccelError if it is not where the hook looks for it.
    """
    key = name.rpartition(".")[2]
    parameter, hook = module._parameters[key], vars(module)["_hf_hook"]
    assert parameter is not None
    try:
        tensor: Tensor = hook.weights_map[key]
    except Exception as error:  # a file that is gone or damaged, a name that is not in the index
        raise HfAccelError(f"{name!r} cannot be read from where accelerate offloads it: {error!r}") from error
    if tensor.shape != parameter.shape:
        found, expected = list(tensor.shape), list(parameter.shape)
        raise HfAccelError(f"{name!r} has the shape {found} where accelerate offloads it, and not {expected}")
    return tensor.detach().to("cpu", parameter.dtype)


def read_bias(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the bias of an offloaded module as a parameter in memory. name: the module's."""
    bias = module._parameters.get("bias")
    return None if bias is None else nn.Parameter(read_offloaded(module, f"{name}.bias").clone(), bias.requires_grad)


def _hooks(hook: Any) -> Iterator[Any]:
    if isinstance(hook, SequentialHook):
        for each in hook.hooks:
            yield from _hooks(each)
    elif hook is not None:
        yield hook


def _is_cpu(device: Any) -> bool:
    """Return whether a hook's device is the CPU: accelerate takes names, numbers of GPUs, and torch's devices."""
    return isinstance(device, str | torch.device) and torch.device(device).type == "cpu"


def _calls_the_class(module: nn.Module) -> bool:
    """Return whether the forward is accelerate's function, around the forward of the module's class."""
    forward, inner = vars(module).get("forward"), vars(module).get("_old_forward")
    hooked = isinstance(forward, partial) and forward.func.__globals__.get("__name__") == "accelerate.hooks"
    ours = getattr(inner, "__self__", None) is module and getattr(inner, "__func__", None) is type(module).forward
    return hooked and ours
