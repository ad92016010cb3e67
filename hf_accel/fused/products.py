"""Matrix products that share their input as one native call, whatever the weights are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ..instance import Mixin
from ..kernels.cpu.float_linear import FloatLinear
from ..kernels.cpu.integer_linear import IntegerLinear
from ..kernels.cpu.library import FLOATS, refusal
from ..linear import QuantLinear
from ..linear.cpu import Cpu, CpuWeight
from ..tensors import is_plain as is_plain_tensor
from ..tensors import is_recorded

# Rows above which torch's matmul of float weights, which packs them first, is faster than reading them in place.
FLOAT_ROWS = {torch.bfloat16: 16, torch.float16: 128, torch.float32: 128}
UNLIMITED = 2**62

NativeCall = IntegerLinear | FloatLinear


def native(x: object) -> bool:
    """Whether a native call may take the place of torch's operators on x."""
    return (
        not torch.is_grad_enabled()
        and not is_recorded()
        and is_plain_tensor(x)  # type: ignore[arg-type]
        and x.is_cpu  # type: ignore[attr-defined]
        and x.dtype in FLOATS  # type: ignore[attr-defined]
        and not torch.is_autocast_enabled("cpu")
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether calling `layer` does nothing but its product: no adapter around it, and nothing that wants to see it."""
    kind = type(layer)
    if kind is not QuantLinear and kind is not nn.Linear and not isinstance(layer, NativeLinear):
        return False
    return is_unobserved(layer)


def is_unobserved(module: nn.Module) -> bool:
    """Whether nobody would notice that a module is not called: no hooks, and the forward of its class."""
    own = module.__dict__
    hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or _global_forward_hooks or _global_forward_pre_hooks
    return not hooked and "forward" not in own


class Products:
    """One native call for several layers, made again when one of them was packed or replaced since.

    epilogue: as IntegerLinear's. float_rows: the most rows that float weights are multiplied by natively.
    A copy or a pickle starts without the call, which holds addresses.
    """

    def __init__(self, float_rows: int, epilogue: str | None = None) -> None:
        self.float_rows, self.epilogue = float_rows, epilogue
        self._sources: list[Any] = []
        self._call: NativeCall | None = None

    def call(self, layers: tuple[nn.Module, ...], x: Tensor) -> NativeCall | None:
        """The call for these layers on x [..., in]; None where they have no common one, or torch's is faster.

        None for an x of another size too, so that the layers complain of it themselves.
        """
        sources = [source for layer in layers for source in _sources(layer)]
        if len(sources) != len(self._sources) or any(a is not b for a, b in zip(sources, self._sources, strict=True)):
            self._call, self._sources = _make(layers, self.epilogue), sources
        call = self._call
        if call is None or call.in_features != x.shape[-1] or x.numel() == 0:
            return None
        return None if isinstance(call, FloatLinear) and not self._takes(call, x) else call

    def _takes(self, call: FloatLinear, x: Tensor) -> bool:
        return x.dtype is call.weights[0].dtype and x.numel() <= self.float_rows * x.shape[-1]

    def __reduce__(self) -> Any:
        return Products, (self.float_rows, self.epilogue)


def _sources(layer: nn.Module) -> tuple[Any, Any]:
    """What a call's addresses are those of."""
    weight = layer._packed if isinstance(layer, QuantLinear) else layer._parameters.get("weight")
    return weight, layer._parameters.get("bias")


def _make(layers: tuple[nn.Module, ...], epilogue: str | None) -> NativeCall | None:
    if refusal() is not None:  # a pickled model may arrive where no kernels were built
        return None
    quantized = [layer for layer in layers if isinstance(layer, QuantLinear)]
    if len(quantized) == len(layers):
        return _make_integer(quantized, epilogue)
    if quantized or not all(is_readable(layer) for layer in layers):
        return None
    weights, biases = zip(*(_sources(layer) for layer in layers), strict=True)
    shapes = {tuple(weight.shape) for weight in weights}
    if len({weight.dtype for weight in weights}) > 1 or len({columns for _, columns in shapes}) > 1:
        return None
    if epilogue is not None and len(shapes) > 1:
        return None
    return FloatLinear(weights, biases, epilogue)


def _make_integer(layers: list[QuantLinear], epilogue: str | None) -> IntegerLinear | None:
    if not all(layer.choice is not None and isinstance(layer.choice.backend, Cpu) for layer in layers):
        return None
    weights: list[CpuWeight] = [layer._packed for layer in layers]
    if len({(w.weight.bits, w.weight.in_features, w.weight.activation_group) for w in weights}) > 1:
        return None
    if epilogue is not None and len({w.weight.out_features for w in weights}) > 1:
        return None
    return IntegerLinear([w.weight for w in weights], [layer.bias for layer in layers], epilogue=epilogue)


def is_readable(layer: nn.Module) -> bool:
    """Whether the kernels can read the layer's weight and bias where they are, and torch would multiply by them."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None or weight.ndim != 2 or weight.dtype not in FLOATS:
        return False
    if bias is not None and (bias.dtype is not weight.dtype or bias.shape != weight.shape[:1]):
        return False
    tensors = [weight] if bias is None else [weight, bias]
    return all(is_plain_tensor(t) and t.is_cpu and t.is_contiguous() for t in tensors)


class NativeLinear(Mixin):
    """Mixed into an nn.Linear: few rows are multiplied natively by the weight where it is."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        if native(x):
            own = self.__dict__
            shared = own.get("_hf_accel_shared")
            out: Tensor | None = None if shared is None else shared.take(self, x)
            if out is not None:
                return out
            call = own["_hf_accel_products"].call((self,), x)
            if call is not None:
                result: Tensor = call(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
                return result
        stock: Tensor = super().forward(x)  # type: ignore[misc]
        return stock
