"""The gated activations of an MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import byref, c_void_p

import torch
from torch import Tensor

from .library import DTYPES, function, threads
from .structs import EPILOGUES, GatedCall
from .tensors import as_rows, refuse_gradients


@functools.cache
def _gated() -> Callable[..., None]:
    return function("gated", c_void_p)


def gated(activation: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """act(gate) * up, rounded to the dtype after each of the two, as torch does -> [..., I]

    activation: "silu", "gelu" (erf) or "gelu_tanh". gate, up [..., I] of one float dtype; without `up`, gate is
    [..., 2 I] with the gate's half first.
    """
    refuse_gradients("gated", gate, up)
    gate, gate_stride = as_rows(gate)
    size = gate.shape[-1]
    itemsize = 0
    if up is None:
        size //= 2
        up, up_stride, itemsize = gate, gate_stride, gate.itemsize
    else:
        up, up_stride = as_rows(up)
    out = torch.empty((*gate.shape[:-1], size), dtype=gate.dtype)
    call = GatedCall(
        gate.data_ptr(), up.data_ptr() + size * itemsize, out.data_ptr(), gate_stride, up_stride,
        out.numel() // size if size else 0, size, EPILOGUES[activation], DTYPES[gate.dtype], threads(),
    )  # fmt: skip
    _gated()(byref(call))
    return out
