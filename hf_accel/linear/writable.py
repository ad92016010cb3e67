"""A quantized layer's weight in floating point, writes to which are not lost."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .formats import QuantizedWeight

IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
HARMLESS = {"requires_grad_", "detach_", "share_memory_"}


class Writable(Protocol):
    """A quantized layer. writes: how often its weight was replaced."""

    writes: int

    @property
    def quantized(self) -> QuantizedWeight: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    def write(self, weight: Tensor) -> None: ...


class WritableWeight(Tensor):
    """A copy of a layer's weight [out, in]; what is written to it or to a view of it, the layer quantizes again.

    Libraries that merge adapters write `weight.data += delta`, `weight.data = merged` or `weight.data.copy_(merged)`.
    What is computed from it is a plain tensor, and so are its copies and pickles. What `detach` gives, and with it
    nn.Parameter(weight), writes to the layer no more.
    """

    _layer: Writable
    _whole: WritableWeight | None = None  # of which this is a view; itself, if it is none; None: detached
    _seen: int  # the layer's `writes` when its weight was the same as this
    _is_hf_initialized = True  # transformers would draw random numbers for a new weight

    @classmethod
    def of(cls, layer: Writable) -> WritableWeight:
        weight = layer.quantized.dequantize(layer.compute_dtype).as_subclass(cls)
        weight._layer, weight._whole, weight._seen = layer, weight, layer.writes
        return weight

    def is_current(self, layer: Writable) -> bool:
        """Whether this is the whole weight of `layer`, as it is now."""
        whole = self._whole
        return whole is not None and self._layer is layer and self.shape == whole.shape and whole._seen == layer.writes

    @property
    def data(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            data = self.detach()
        return data if self._whole is None else self._view(data)

    @data.setter
    def data(self, value: Tensor) -> None:
        if self._whole is None:
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        elif not (isinstance(value, WritableWeight) and value.is_current(self._layer)):
            self._layer.write(value)

    def _view(self, result: Tensor) -> WritableWeight:
        view = result.as_subclass(WritableWeight)
        view._layer, view._whole = self._layer, self._whole
        return view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            written, name = (
                args[0] if args else next(iter((kwargs or {}).values()), None),
                getattr(func, "__name__", ""),
            )
            if not isinstance(written, cls):
                return result
            if name == "detach":
                return result.as_subclass(cls)
            if written._whole is None:
                return result
            if name in IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in HARMLESS):
                written._layer.write(written._whole.as_subclass(Tensor))
                written._whole._seen = written._layer.writes
            return written._view(result) if type(result) is Tensor and _share_memory(result, written) else result

    def _plain(self) -> Tensor:
        plain = self.as_subclass(Tensor).detach()
        return nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.device.type != "meta" and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
