"""The RMSNorm behind a recurrent layer, and the gate that it is multiplied by."""

from __future__ import annotations

from ctypes import Structure
from typing import NamedTuple

import torch
from torch import Tensor

from .library import ACTIVATIONS, DTYPES, fields, kernel, refuse_gradients, threads


class GatedNormCall(Structure):
    _fields_ = fields(
        pointers="x gate weight out", sizes="x_stride gate_stride out_stride rows parts size weight_stride",
        floats="eps", ints="rounds gate_first activation dtype weight_dtype out_dtype threads",
    )  # fmt: skip


_gated_norm = kernel("gated_norm", GatedNormCall)


class GateForm(NamedTuple):
    """The form of a norm and its gate.

    parts: of a row that are normalized each by itself. gate_first: whether x * act(gate) is what is normalized.
    activation: "silu" or "sigmoid".
    """

    eps: float
    parts: int = 1
    gate_first: bool = False
    activation: str = "silu"


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, form: GateForm) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight * act(gate) for parts of each row, in float32.

    x: [M, D], float32, or of the gate's dtype: then the normalized x is rounded to it too. gate: [M, D] of a dtype of
    FLOATS. weight: [D] of any of them, or None: then there is the gate alone. Returns [M, D] float32. Raises
    UnsupportedError if a gradient is needed.
    """
    refuse_gradients("gated_norm", x, gate, weight)
    rounds, x = x.dtype is not torch.float32, x.float()
    x, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (x, gate))
    weight = None if weight is None else weight.contiguous()
    eps, parts, gate_first, activation = form
    size = x.shape[1] // parts
    out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    _gated_norm(
        x.data_ptr(), gate.data_ptr(), 0 if weight is None else weight.data_ptr(), out.data_ptr(), x.stride(0),
        gate.stride(0), x.shape[1], len(x), parts, size, size, eps, rounds, gate_first, ACTIVATIONS[activation],
        DTYPES[gate.dtype], DTYPES[torch.float32 if weight is None else weight.dtype], DTYPES[torch.float32],
        threads(),
    )  # fmt: skip
    return out
