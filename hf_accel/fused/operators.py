"""What norms, rotations and gates are computed by: the native library on the CPU, Triton on an NVIDIA GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import cpu, triton
from ..kernels.cpu import elementwise, library
from ..kernels.layouts import KV
from ..tensors import PLAIN, is_recorded


def refusal(device_type: str) -> str | None:
    """Why nothing of it is computed on tensors of this kind of device, as a clause; None if it is."""
    if device_type != "cpu":
        return triton.refusal(device_type)
    return cpu.refusal() if triton.refusal("cpu") is not None else None


def computes(x: object) -> bool:
    """Whether one call may replace torch's operators on x."""
    if library.native(x):
        return True
    return (
        not torch.is_grad_enabled()
        and type(x) in PLAIN
        and x.is_cuda  # type: ignore[attr-defined]
        and x.dtype in library.FLOATS  # type: ignore[attr-defined]
        and not is_recorded()
        and not torch.is_autocast_enabled("cuda")
        and triton.refusal("cuda") is None
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float, round_first: bool) -> Tensor:
    """As the CPU's; x and weight on one device."""
    if by_library(x):
        return elementwise.rms_norm(x, weight, eps, offset=offset, round_first=round_first)
    from ..kernels.triton import layer_parts

    return layer_parts.rms_norm(x, weight, eps, offset=offset, round_first=round_first)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, round_each: bool
) -> tuple[Tensor, Tensor]:
    """As the CPU's; all on one device. cos, sin: [B or 1, T, D]."""
    if by_library(q):
        return elementwise.rope(q, k, cos, sin, interleaved=interleaved, round_each=round_each)
    from ..kernels.triton import layer_parts

    each = elementwise.rounds_each(q.dtype, cos.dtype, round_each=round_each)
    return layer_parts.rope(q, k, cos, sin, interleaved=interleaved, round_each=each)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, *, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """x + y and its `rms_norm`, by Triton in one launch: the bits of one after the other."""
    from ..kernels.triton import layer_parts

    return layer_parts.add_rms_norm(x, y, weight, eps, offset=offset, round_first=round_first)


def rope_and_write(
    heads: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor], pages: KV, slots: Tensor, *,
    interleaved: bool, round_each: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rope` of q and k, and the write of K and V, by Triton in one launch. heads: q, k and v, [B, H, T, D]."""
    from ..kernels.triton import kv_write

    each = elementwise.rounds_each(heads[0].dtype, tables[0].dtype, round_each=round_each)
    return kv_write.rope_and_write(heads, tables, pages, slots, interleaved=interleaved, round_each=each)


def gated(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """activation(gate) * up of one shape and dtype, by Triton: the library does it while it multiplies."""
    from ..kernels.triton import layer_parts

    return layer_parts.gated(gate, up, activation=activation)


def by_library(x: Tensor) -> bool:
    """Whether the native library computes on x; else Triton does."""
    return x.is_cpu and cpu.refusal() is None


def has_library(device_type: str) -> bool:
    """Whether the native library computes on this kind of device."""
    return device_type == "cpu" and cpu.refusal() is None
