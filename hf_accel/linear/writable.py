"""A quantized layer's weight in floating point, writes to which are not lost."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from .formats import QuantizedWeight

WAY_OUT = "read layer.weight.clone(), and write with layer.weight.copy_(values)"
UNCOUNTED = ("apply_", "map_", "map2_", "data_ptr")  # and _fused_: they write, or let write, and count nothing
HANDS_OUT = ("numpy", "__array__", "untyped_storage")


def nobody() -> None:
    """Stand for the float copy of a weight that nobody holds."""


class Writable(Protocol):
    """A quantized layer. writes: how often its weight was replaced."""

    @property
    def writes(self) -> int: ...
    @property
    def quantized(self) -> QuantizedWeight: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    def write(self, weight: Tensor) -> None: ...


class Lent:
    """The float copy of a layer's weight that all WritableWeights over one memory stand for.

    torch counts the writes to a tensor and its views in one number, however they are made (`out=`, `_foreach_`, a
    scripted function): `settle` looks at it after each function that was given such a tensor, when the layer's weight
    is read again, and when the last such tensor goes.
    """

    def __init__(self, layer: Writable) -> None:
        with torch.inference_mode(False), torch.no_grad():  # writes to inference tensors are not counted
            self.values = layer.quantized.dequantize(layer.compute_dtype)
        self.layer, self.writes, self.version = layer, layer.writes, self.values._version
        self.fits = True  # whether the layer still has the dtype and the device of the values
        self.before: Tensor | None = None  # the values, where somebody may write to them uncounted

    def __del__(self) -> None:
        if hasattr(self, "before"):
            self.settle()

    @property
    def is_current(self) -> bool:
        """True if nothing else gave the layer another weight, dtype or device since."""
        return self.fits and self.writes == self.layer.writes

    def watch(self) -> None:
        """Compare the values themselves from now on."""
        if self.before is None:
            self.before = self.values.clone()

    def settle(self) -> None:
        """Let the layer quantize the values again if they were written to."""
        if not self.note_writes() or self.writes != self.layer.writes:
            return  # the layer was given another weight: this one is in the model no more, as with a float layer
        if not self.fits:
            raise UnsupportedError(
                "this weight was read before its layer was given another dtype or device, and cannot be written to it "
                "any more; read layer.weight again"
            )
        self.layer.write(self.values)
        self.writes = self.layer.writes

    def replace(self, values: Tensor) -> None:
        """Take other numbers, which the layer has been given already."""
        with torch.no_grad():
            self.values.copy_(values)
        self.note_writes()
        self.writes = self.layer.writes

    def note_writes(self) -> bool:
        """Return whether the values were written to since this was last asked."""
        version, before = self.values._version, self.before
        written = version != self.version or (before is not None and not torch.equal(before, self.values))
        if written:
            self.version, self.before = version, None if before is None else self.values.clone()
        return written


class WritableWeight(Tensor):
    """A copy of a layer's weight [out, in]; what is written to it or to a view of it, the layer quantizes again.

    Libraries that merge adapters write `weight.data += delta`, `weight.data = merged` or `weight.data.copy_(merged)`.
    What is computed from it is a plain tensor, and so are its copies and pickles; nn.Parameter(weight) has memory of
    its own. NumPy arrays and storages over its memory can be read only, since nothing tells of writes to them.
    """

    _lent: Lent | None = None  # None: it has memory of its own, as a Parameter made of it does
    _is_whole = False
    _is_made_parameter = False
    _is_hf_initialized = True  # transformers would draw random numbers for a new weight

    @classmethod
    def of(cls, layer: Writable) -> WritableWeight:
        lent = Lent(layer)
        whole = _over(lent, lent.values)
        whole._is_whole = True
        return whole

    def is_weight_of(self, layer: Writable) -> bool:
        """Return whether this is the whole weight of `layer`, as it is now."""
        lent = self._lent
        if lent is None or lent.layer is not layer:
            return False
        lent.settle()
        return lent.is_current and _place(plain(self)) == _place(lent.values)

    def settle(self) -> None:
        """Let the layer quantize again what was written since in a way that nothing reported."""
        if self._lent is not None:
            self._lent.settle()

    def refresh(self) -> None:
        """Take the numbers that the layer has been given since."""
        assert self._lent is not None
        self._lent.replace(self._lent.layer.quantized.dequantize(self._lent.layer.compute_dtype))

    def let_go(self) -> None:
        """Refuse to be written to from now on: the layer has another dtype or device."""
        assert self._lent is not None
        self._lent.fits = False

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        lent = self._lent
        if lent is None or not self._is_whole:
            self._lent = None
            Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        elif not (isinstance(value, WritableWeight) and value.is_weight_of(lent.layer)):
            lent.layer.write(plain(value))
            if value.shape == lent.values.shape:  # else the layer is none of ours any more
                lent.replace(plain(value))

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """Set the numbers as Tensor.set_ does; torch calls it without asking `__torch_function__`."""
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        self.data = made.set_(*args, **kwargs)
        return self

    @property
    def _is_param(self) -> bool:
        return self._is_made_parameter

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """nn.Parameter sets it on the `detach()` of what it is made of, which gets memory of its own here."""
        own = plain(self).detach().clone().as_subclass(WritableWeight).requires_grad_(self.requires_grad)
        torch._C._swap_tensor_impl(self, own)
        self._lent, self._is_made_parameter = None, value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            weights = [weight for weight in _weights((args, kwargs)) if weight._lent is not None]
            lents = list(dict.fromkeys(cast(Lent, weight._lent) for weight in weights))
            for lent in lents:
                _prepare(lent, name, kwargs)
            result = func(*args, **kwargs)
            _refuse_other_shapes(weights, name)
            for lent in lents:
                lent.settle()
                result = _labelled(result, lent)
            if name == "detach" and type(result) is Tensor:
                return _over(None, result)
            return _read_only(result) if lents and name in HANDS_OUT else result

    def _copy(self) -> Tensor:
        own = plain(self).detach().clone()
        return nn.Parameter(own, self.requires_grad) if self._is_made_parameter else own

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self._copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copy().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ReadOnlyStorage(torch.UntypedStorage):
    """The memory of a copy of a quantized layer's weight."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"this storage holds a copy of a quantized layer's weight, and writes to it would be lost; {WAY_OUT}"
        )

    fill_ = copy_ = resize_ = byteswap = __setitem__ = _refuse


def plain(tensor: Tensor) -> Tensor:
    """A tensor without the mark that it is the weight of a layer."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, WritableWeight) else tensor


def _over(lent: Lent | None, tensor: Tensor) -> WritableWeight:
    weight = tensor.as_subclass(WritableWeight)
    weight._lent = lent
    return weight


def _weights(given: Any) -> Iterator[WritableWeight]:
    """All in lists, tuples and dicts."""
    if isinstance(given, WritableWeight):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _weights(each)
    elif isinstance(given, dict):
        yield from _weights(list(given.values()))


def _labelled(result: Any, lent: Lent) -> Any:
    """A result with each view of the weight in it as a WritableWeight."""
    if type(result) is Tensor:
        return _over(lent, result) if _share_memory(result, lent.values) else result
    if type(result) in (list, tuple):
        return type(result)(_labelled(each, lent) for each in result)
    return result


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.layout is b.layout and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return the place of a tensor in its memory."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _prepare(lent: Lent, name: str, kwargs: Mapping[str, Any]) -> None:
    """Before a function `name`. Raises UnsupportedError where the memory would be handed to somebody unseen."""
    if name in UNCOUNTED or name.startswith("_fused_"):
        lent.watch()
    if name == "storage" or (name == "__dlpack__" and not kwargs.get("copy")):
        raise UnsupportedError(
            f"{name}() would hand out the memory of a copy of a quantized layer's weight, and writes to it would be "
            f"lost; {WAY_OUT}"
        )


def _refuse_other_shapes(weights: list[WritableWeight], name: str) -> None:
    """Raise UnsupportedError if a function `name` transposed or resized the weight itself, as resize_ and t_ do."""
    for weight in weights:
        lent = weight._lent
        if weight._is_whole and lent is not None and _place(plain(weight)) != _place(lent.values):
            lent.note_writes()  # which are none
            raise UnsupportedError(
                f"{name}() cannot change the shape of a quantized layer's weight; call hf_accel.unpatch(model) before"
            )


def _read_only(result: Any) -> Any:
    """A NumPy array or a storage, to which nobody can write."""
    if isinstance(result, torch.UntypedStorage):
        result.__class__ = ReadOnlyStorage
    elif not result.flags.owndata:  # else it is a copy
        result.setflags(write=False)
    return result
