"""What every wrapper asks of its tensors, in as few Python calls as can be."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_tracing, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from ...errors import UnsupportedError
from ...tensors import PLAIN
from .library import FLOATS


def is_recorded() -> bool:
    """Whether torch records or transforms the operators that run now, among which it would not see a native call.

    torch.compile, export, jit.trace, make_fx, fake tensors, FLOP counters; vmap, grad and jvp.
    """
    return is_compiling() or _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active() or _is_tracing()


def native(x: object) -> bool:
    """Whether a native call may take the place of torch's operators on x."""
    return (
        not torch.is_grad_enabled()
        and not is_recorded()
        and type(x) in PLAIN
        and x.is_cpu  # type: ignore[attr-defined]
        and x.dtype in FLOATS  # type: ignore[attr-defined]
        and not torch.is_autocast_enabled("cpu")
    )


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which torch multiplies by x, and attends: that of autocast where it is on, or x's own."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(kind)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """That of torch.autocast, which knows no meta device; None where it is off."""
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [..., size] as rows one stride apart, and that stride in elements; a copy where it has none."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.ndim == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def refuse_gradients(kernel: str, *tensors: Tensor | None) -> None:
    """Raises UnsupportedError if autograd would have to go through a kernel, which has no backward."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(f"{kernel}: the cpu kernel has no gradient; call it under torch.no_grad()")
