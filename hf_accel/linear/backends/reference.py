"""Plain torch, on any device and in any dtype: the oracle of every backend, and the last resort."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels import ACTIVATION_GROUP
from ...tensors import has_instructions
from ..activations import EightBits, round_groups
from ..formats import KINDS, QuantizedWeight, chunks
from .backend import Backend, LinearSpec

ROUNDED: tuple[EightBits | None, ...] = (None, "int8", "fp8")


class Reference(Backend):
    """Dequantizes a chunk of outputs at a time and multiplies in floating point.

    activations "int8", or "fp8" for FP8 weights: rounded per row and group of inputs, which are the weight's if its
    scales belong to groups, and 128 otherwise.
    """

    name = "reference"
    own_formats_only = False
    finds_rows = True

    def __init__(self, activations: EightBits | None) -> None:
        self.activations = activations
        integers = tuple(label for label in KINDS if label != "fp8")
        self.layouts = {None: tuple(KINDS), "int8": integers, "fp8": ("fp8",)}[activations]

    def note(self, spec: LinearSpec) -> str | None:
        if spec.layout.label in ("int8", "int4"):
            return None
        what = f"{spec.layout.bits} bits here" if spec.layout.format == "int" else f"{spec.layout.label.upper()} here"
        return f"no kernel multiplies by {what}: each call dequantizes the weight first, slower than stock"

    def pack(self, weight: QuantizedWeight) -> QuantizedWeight:
        return weight

    def unpack(self, packed: QuantizedWeight) -> QuantizedWeight:
        return packed

    def run(self, x: Tensor, packed: QuantizedWeight, bias: Tensor | None) -> Tensor:
        rows = x
        if self.activations:
            rows = round_groups(x, self.activation_group(packed), self.activations)
        biases = rows.new_zeros(packed.shape[0]) if bias is None else bias.to(rows.dtype)
        pieces = (F.linear(rows, packed.dequantize(rows.dtype, outputs=o), biases[o]) for o in chunks(len(biases)))
        return torch.cat(list(pieces), dim=-1).to(x.dtype)

    def activation_group(self, weight: QuantizedWeight) -> int:
        """Inputs of a row that share a scale."""
        return weight.layout.group_size or ACTIVATION_GROUP


class ReferenceByRow(Reference):
    """The reference of backends that round each row of activations as a whole."""

    name = reference = "reference by row"
    own_formats_only = True

    def __init__(self, activations: EightBits) -> None:
        super().__init__(activations)
        self.layouts = (activations,)

    def activation_group(self, weight: QuantizedWeight) -> int:
        return weight.shape[1]


REFERENCES: dict[EightBits | None, Reference] = {each.activations: each for each in map(Reference, ROUNDED)}


class _DifferentiableLinear(torch.autograd.Function):
    """The reference with a gradient for the input and the bias.

    The weight is dequantized again in backward: autograd would keep a float copy of every layer.
    Rounding of activations passes the gradient straight through.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, backend: Backend, packed: Any) -> Tensor:
        ctx.backend, ctx.packed = backend, packed
        return REFERENCES[backend.activations].run(x, backend.unpack(packed), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.backend.unpack(ctx.packed)
            wide = grad.float() if grad.is_cpu and not has_instructions(grad.dtype) else grad
            pieces = (wide[:, o] @ weight.dequantize(wide.dtype, outputs=o) for o in chunks(weight.shape[0]))
            grad_x = sum(pieces, start=wide.new_zeros(())).to(grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.sum(dim=0)
        return grad_x, grad_bias, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def differentiable_linear(x: Tensor, bias: Tensor | None, backend: Backend, packed: Any) -> Tensor:
    """x [rows, in] -> [rows, out] by the reference, as `backend` rounds, with gradients for x and bias."""
    result: Tensor = _DifferentiableLinear.apply(x, bias, backend, packed)  # type: ignore[no-untyped-call]
    return result
