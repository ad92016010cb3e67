"""A product for each head with the weights of that head, as attention over compressed keys needs them."""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from .library import DTYPES, fields, kernel, refuse_gradients, threads

OF_OUTPUTS = 2  # weights that are transposed, and scales of the outputs


class HeadsCall(Structure):
    _fields_ = fields(
        pointers="x weight scales out",
        sizes="x_token x_head out_token out_head weight_head weight_row scale_head tokens heads inputs outputs",
        ints="transposed dtype weight_dtype threads",
    )  # fmt: skip


_head_products = kernel("head_products", HeadsCall)


def head_products(
    x: Tensor, weight: Tensor, *, out: Tensor, scales: Tensor | None = None, transposed: int = False
) -> None:
    """Compute out[n, h] = weight[h] @ x[n, h], or with the transposed of weight[h], in place.

    x: [N, H, I], out: [N, H, O], of one dtype of FLOATS; columns are contiguous. weight: [H, O, I], or [H, I, O] if it
    is `transposed`, of a dtype of FLOATS, or int8 with float32 scales of its rows, [H, rows of weight[h]], or of the
    outputs, [H, O], if `transposed` is OF_OUTPUTS. Rows are contiguous.
    Sums are in float32 and rounded once; those of a token depend neither on other tokens nor on the number of threads.
    Raises UnsupportedError if a gradient is needed.
    """
    refuse_gradients("head_products", x, weight)
    x = x if x.stride(2) == 1 else x.contiguous()
    (tokens, heads, inputs), outputs = x.shape, out.shape[2]
    how = int(transposed if scales is not None else bool(transposed))
    _head_products(
        x.data_ptr(), weight.data_ptr(), 0 if scales is None else scales.data_ptr(), out.data_ptr(), x.stride(0),
        x.stride(1), out.stride(0), out.stride(1), weight.stride(0), weight.stride(1),
        0 if scales is None else scales.stride(0), tokens, heads, inputs, outputs, how, DTYPES[x.dtype],
        DTYPES[weight.dtype], threads(),
    )  # fmt: skip


def reference(x: Tensor, weight: Tensor, *, scales: Tensor | None = None, transposed: int = False) -> Tensor:
    """Return what `head_products` computes, by torch's operators."""
    exact = torch.promote_types(x.dtype, torch.float32)
    place = 1 if transposed == OF_OUTPUTS else 2
    wide = weight.to(exact) if scales is None else weight.to(exact) * scales.unsqueeze(place)
    wide = wide if transposed else wide.transpose(1, 2)
    return torch.matmul(x.transpose(0, 1).to(exact), wide).transpose(0, 1).to(x.dtype)
