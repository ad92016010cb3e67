"""Native calls for linear layers, among them those whose float weight is read in place.

On CPUs on which torch multiplies halves one by one, ours multiply any number of rows by half-precision weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hardware import UNLIMITED
from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.integer_linear import IntegerLinear
from ..kernels.cpu.library import FLOATS, level_in_use, native, refusal
from ..linear import QuantLinear
from ..linear.backends.cpu import Cpu, CpuWeight
from ..recognition.unchanged import is_derived, is_replaced, is_unobserved
from ..tensors import has_instructions, is_plain_tensor
from ..undo.journal import Mixin
from ..undo.state import FUSED

NativeCall = IntegerLinear | FloatLinear


def native_rows(dtype: torch.dtype, *, by_inputs: bool = False) -> int:
    """Return the most rows with which our product of float weights is faster than torch's on CPUs like this one; of
    experts, the most rows of each, on average. by_inputs: whether weights are [in, out].
    """
    if is_slow_in_torch(dtype):
        return UNLIMITED
    return level_in_use().most_rows(dtype, by_inputs=by_inputs)


def is_bare_linear(layer: nn.Module) -> bool:
    """Return whether calling `layer` does nothing but its product: it has no adapter and no hook."""
    kind = type(layer)
    if kind is QuantLinear:
        return is_unobserved(layer)
    if kind is not nn.Linear and (not isinstance(layer, NativeLinear) or is_derived(kind)):
        return False
    return is_unobserved(layer) and not is_replaced(kind)


class ProjectionCall:
    """One native call for one layer or several, made again when one of them was packed or replaced since.

    epilogue, activation: as IntegerLinear's. float_rows: the most rows that float weights are multiplied by natively.
    A copy or a pickle starts without the call, which holds addresses.
    """

    def __init__(self, float_rows: int, epilogue: str | None = None, activation: str | None = None) -> None:
        self.float_rows, self.epilogue, self.activation = float_rows, epilogue, activation
        self._held: list[tuple[Any, Any]] = []  # weights and biases, whose addresses the call has
        self._call: NativeCall | None = None

    def ready(self, layers: tuple[nn.Module, ...], x: Tensor) -> NativeCall | None:
        """Return the call for these layers on x [..., in]; None if they have no common one, or torch is faster.

        None for an x of another size too, so that the layers raise their own error.
        """
        if not self._is_current(layers):
            self._call = make_call(layers, self.epilogue, self.float_rows, activation=self.activation)
            self._held = [_tensors(layer) for layer in layers]
        call, size = self._call, x.shape[-1]
        if call is None or call.in_features != size or x.numel() == 0:
            return None
        if isinstance(call, FloatLinear):
            if not call.has_shapes():  # its data was replaced, as by resize_token_embeddings()
                self._held = []
                return self.ready(layers, x)
            takes = x.dtype is call.weights[0].dtype and x.numel() <= self.float_rows * size
            return call if takes else None
        return call

    def _is_current(self, layers: tuple[nn.Module, ...]) -> bool:
        if len(layers) != len(self._held):
            return False
        for layer, (weight, bias) in zip(layers, self._held, strict=True):
            own = layer.__dict__
            held = own["_packed"] if "_packed" in own else own["_parameters"].get("weight")
            if held is not weight or own["_parameters"].get("bias") is not bias:
                return False
        return True

    def __reduce__(self) -> Any:
        return ProjectionCall, (self.float_rows, self.epilogue, self.activation)


def _tensors(layer: nn.Module) -> tuple[Any, Any]:
    """Return a layer's weight, packed if it is quantized, and its bias."""
    weight = layer._packed if isinstance(layer, QuantLinear) else layer._parameters.get("weight")
    return weight, layer._parameters.get("bias")


def make_call(
    layers: tuple[nn.Module, ...], epilogue: str | None, float_rows: int, *, activation: str | None = None
) -> NativeCall | None:
    """Make one call for these layers, see ProjectionCall; None if they have no common one.

    activation: as IntegerLinear's.
    """
    if refusal() is not None:  # a pickled model may arrive where no kernels were built
        return None
    quantized = [layer for layer in layers if isinstance(layer, QuantLinear)]
    if len(quantized) == len(layers):
        return _make_integer(quantized, epilogue, activation)
    by_inputs = isinstance(layers[0], NativeConv1D)
    if quantized or any(isinstance(layer, NativeConv1D) is not by_inputs for layer in layers):
        return None
    if not all(is_readable(layer, by_inputs=by_inputs) for layer in layers):
        return None
    held, biases = zip(*(_tensors(layer) for layer in layers), strict=True)
    weights = [matrix(weight) for weight in held]
    shapes = {tuple(weight.shape) for weight in weights}
    if len({weight.dtype for weight in weights}) > 1 or len({shape[not by_inputs] for shape in shapes}) > 1:
        return None
    if epilogue is not None and len(shapes) > 1:
        return None
    return FloatLinear(weights, biases, epilogue, activation=activation, by_inputs=by_inputs)


def _make_integer(layers: list[QuantLinear], epilogue: str | None, activation: str | None) -> IntegerLinear | None:
    if not all(layer.choice is not None and isinstance(layer.choice.backend, Cpu) for layer in layers):
        return None
    if any(layer._input_order is not None or "bias" not in layer._parameters for layer in layers):
        return None
    weights: list[CpuWeight] = [layer._packed for layer in layers]
    if len({(w.weight.format, w.weight.in_features, w.weight.activation_group) for w in weights}) > 1:
        return None
    if epilogue is not None and len({w.weight.out_features for w in weights}) > 1:
        return None
    biases = [layer.bias for layer in layers]
    return IntegerLinear([w.weight for w in weights], biases, epilogue=epilogue, activation=activation)


def matrix(weight: Tensor) -> Tensor:
    """Return a weight as [out, in]; that of a convolution over single rows is [out, in, 1]."""
    return weight.squeeze(2) if weight.ndim == 3 and weight.shape[2] == 1 else weight


def is_readable(layer: nn.Module, *, by_inputs: bool = False) -> bool:
    """Return whether the kernels can read the layer's weight and bias where they are, and torch would multiply by
    them. by_inputs: whether the weight is [in, out].
    """
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if "bias" not in layer._parameters:  # prune and parametrize take away what they compute
        return False
    if weight is None or matrix(weight).ndim != 2 or weight.dtype not in FLOATS:
        return False
    if bias is not None and (bias.dtype is not weight.dtype or bias.shape != (weight.shape[by_inputs],)):
        return False
    tensors = [weight] if bias is None else [weight, bias]
    return all(is_plain_tensor(t) and t.is_cpu and t.is_contiguous() for t in tensors)


class NativeLinear(Mixin):
    """A mixin for an nn.Linear: few rows are multiplied natively by the weight, which is read in place."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        if native(x):
            own: dict[str, Any] = self.__dict__
            call = own[FUSED].ready((self,), x)
            if call is not None:
                result: Tensor = call(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
                return result
        stock: Tensor = super().forward(x)  # type: ignore[misc]
        return stock


class NativeConv1D(NativeLinear):
    """A mixin for transformers' Conv1D, whose weight is [in, out]."""


class NativePointwise(NativeLinear):
    """A mixin for a convolution over single rows, which the call of a layer multiplies by; alone it is torch's."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in, T] -> [B, out, T]."""
        result: Tensor = super(NativeLinear, self).forward(x)  # type: ignore[misc]
        return result


HALVES = (torch.bfloat16, torch.float16)


def is_slow_in_torch(dtype: torch.dtype) -> bool:
    """Return whether torch has no instructions for products of this dtype on this CPU."""
    if dtype not in HALVES or has_instructions(dtype):
        return False
    return dtype is torch.float16 or level_in_use().slow_bfloat16_in_torch


class PatchProduct(Mixin):
    """A mixin for a convolution that is given patches as large as its kernel: torch multiplies these several times
    faster than it convolves them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [patches, channels, ...] -> [patches, out, 1, ...] in x's dtype."""
        own: dict[str, Any] = self.__dict__
        weight, bias = (own["_parameters"].get(name) for name in ("weight", "bias"))
        if native(x) and takes_patches(own) and is_patch(weight, bias, x):
            product = F.linear(x.flatten(1), weight.flatten(1), bias)
            return product.view(*product.shape, *[1] * (x.ndim - 2))
        stock: Tensor = super().forward(x)  # type: ignore[misc]
        return stock


def takes_patches(own: dict[str, Any]) -> bool:
    """Return whether a convolution with these attributes has no padding and moves by its whole kernel."""
    plain = not any(own["padding"]) and set(own["dilation"]) == {1} and own["groups"] == 1
    return plain and own["stride"] == own["kernel_size"]


def is_patch(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> bool:
    """Return whether each row of x is as large as the kernel, and all are plain tensors of one dtype."""
    if weight is None or x.shape[1:] != weight.shape[1:] or not x.numel():
        return False
    tensors = [weight] if bias is None else [weight, bias]
    return all(is_plain_tensor(each) and each.is_cpu and each.dtype is x.dtype for each in tensors)
