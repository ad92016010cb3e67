"""The experts of a mixture in one call: those that tokens chose, the gate between their weights, and the sums."""

from __future__ import annotations

import ctypes
from ctypes import Structure
from dataclasses import dataclass

from torch import Tensor

from ...errors import UnsupportedError
from .float_linear import FloatExperts
from .integer_linear import IntegerExperts
from .library import ACTIVATIONS, DTYPES, as_rows, fields, kernel, threads


class MixtureCall(Structure):
    _fields_ = fields(
        pointers="up down x", sizes="x_stride tokens top_k", pointers_="chosen scores out known",
        floats="alpha limit", ints="gate activation dtype score_dtype threads tile_rows",
    )  # fmt: skip


_mixture = kernel("mixture", MixtureCall)


@dataclass(frozen=True)
class Gate:
    """Describe what experts do between their weights, [rows, wide] -> [rows, inner]; each step is rounded.

    number: the MixtureGate of kernels.h. 0: act(x). 1: act(first half) * second half. 2: of numbers that take turns,
    (up + 1) * gate * sigmoid(alpha * gate), where gate is at most `limit` and up between -limit and limit. activation:
    a name of ACTIVATIONS.
    """

    number: int
    activation: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def width(self) -> int:
        """Return how many results of the first weights make one input of the second ones."""
        return 1 if self.number == 0 else 2


Experts = IntegerExperts | FloatExperts


def mixture(weights: tuple[Experts, Experts], gate: Gate, x: Tensor, routes: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sums of what the chosen experts of each token say, times their scores, [tokens, out] of x's dtype.

    weights: those that read x, and those that read what `gate` makes. x: [tokens, in] of a dtype of FLOATS.
    routes: the experts chosen, int64 [tokens, k], and their scores, [tokens, k] of a dtype of FLOATS.

    The results are multiplied by the scores as torch multiplies them, and added up in float32, in the order of k. A
    token's result depends on no other token. Raises UnsupportedError if an expert is chosen that is not there.
    """
    (up, down), (chosen, scores) = weights, routes
    x, stride = as_rows(x)
    chosen, scores, known = chosen.contiguous(), scores.contiguous(), ctypes.c_uint8()
    out = x.new_empty(len(x), down.out_features)
    _mixture(
        up.address(), down.address(), x.data_ptr(), stride, *chosen.shape, chosen.data_ptr(), scores.data_ptr(),
        out.data_ptr(), ctypes.addressof(known), gate.alpha, gate.limit, gate.number, ACTIVATIONS[gate.activation],
        DTYPES[x.dtype], DTYPES[scores.dtype], threads(), up.tile_rows,
    )  # fmt: skip
    if not known:
        low, high = int(chosen.min()), int(chosen.max())
        raise UnsupportedError(f"experts {low} to {high} were chosen, but there are {up.count}")
    return out
