"""Products with half-precision weights in float32, for CPUs on which torch multiplies halves one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.cpu.library import native
from ..tensors import is_plain_tensor
from ..undo.journal import Mixin
from .projections import UNLIMITED, native_rows

HALVES = (torch.bfloat16, torch.float16)
WIDENED = 2**22  # the most weights that are held in float32 at once


def is_slow_in_torch(dtype: torch.dtype) -> bool:
    """Return whether torch has no instructions for products of this dtype on this CPU."""
    return dtype in HALVES and native_rows(dtype) == UNLIMITED


def widened_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x [rows, in] @ weight [in, out] + bias [out], summed in float32 and rounded once to x's dtype."""
    wide, columns = x.float(), max(1, WIDENED // weight.shape[0])
    out = x.new_empty(x.shape[0], weight.shape[1])
    for first in range(0, weight.shape[1], columns):
        part = slice(first, first + columns)
        product = wide @ weight[:, part].float()
        out[:, part] = product if bias is None else product.add_(bias[part])
    return out


class WidenedConv1D(Mixin):
    """Is mixed into transformers' Conv1D, whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        parameters: dict[str, Tensor | None] = self.__dict__["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if native(x) and is_widened(weight, bias, x):
            product = widened_product(x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[arg-type]
            return product.view(*x.shape[:-1], -1)
        stock: Tensor = super().forward(x)  # type: ignore[misc]
        return stock


def is_widened(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> bool:
    """Return whether torch would multiply these as halves: plain tensors of one dtype and of sizes that fit."""
    if weight is None or weight.dtype not in HALVES or weight.ndim != 2 or x.shape[-1:] != weight.shape[:1]:
        return False
    if bias is not None and (bias.dtype is not weight.dtype or bias.shape != weight.shape[1:]):
        return False
    tensors = [weight] if bias is None else [weight, bias]
    return x.dtype is weight.dtype and x.numel() > 0 and all(is_plain_tensor(t) and t.is_cpu for t in tensors)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module has the name and the sizes of transformers' Conv1D."""
    own: dict[str, Any] = vars(module)
    weight = own["_parameters"].get("weight")
    return type(module).__name__ == "Conv1D" and weight is not None and weight.shape == (own.get("nx"), own.get("nf"))
