"""A quantized layer's weight in floating point, writes to which are not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import QuantLinear

IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
HARMLESS = {"requires_grad_", "detach_", "share_memory_"}


class WritableWeight(Tensor):
    """A copy of a layer's weight [out, in]; what is written to it or to a view of it, the layer quantizes again.

    Libraries that merge adapters write `weight.data += delta`, `weight.data = merged` or `weight.data.copy_(merged)`.
    What is computed from it is a plain tensor, and so are its copies and pickles.
    """

    _layer: QuantLinear
    _whole: WritableWeight  # of which this is a view; itself, if it is none
    _seen: int  # the layer's `writes` when its weight was the same as this
    _is_hf_initialized = True  # transformers would draw random numbers for a new weight

    @classmethod
    def of(cls, layer: QuantLinear) -> WritableWeight:
        weight = layer.quantized.dequantize(layer.compute_dtype).as_subclass(cls)
        weight._layer, weight._whole, weight._seen = layer, weight, layer.writes
        return weight

    def is_current(self, layer: QuantLinear) -> bool:
        """Whether this is the whole weight of `layer`, as it is now."""
        return self._layer is layer and self.shape == self._whole.shape and self._whole._seen == layer.writes

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not (isinstance(value, WritableWeight) and value.is_current(self._layer)):
            self._layer.write(value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            written = args[0] if args else next(iter((kwargs or {}).values()), None)
            if not isinstance(written, cls):
                return result
            if type(result) is Tensor and _share_memory(result, written):
                result = result.as_subclass(cls)
                result._layer, result._whole = written._layer, written._whole
            name = getattr(func, "__name__", "")
            if name in IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in HARMLESS):
                whole = written._whole
                written._layer.write(whole.as_subclass(Tensor))
                whole._seen = written._layer.writes
            return result

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.device.type != "meta" and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
