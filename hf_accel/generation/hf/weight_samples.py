"""What is looked at of weights, to see that they were written to: their places and versions, and a few numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...kernels import cpu
from ...kernels.cpu.samples import SampleTable

SAMPLES = 256  # numbers of each tensor
JOINED = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)  # by torch
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def facts_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return what plain tensors are without their numbers, and how often torch knows of a write to them."""
    return [(t.dtype, t.shape, t.stride(), t.device, t.data_ptr(), version_of(t)) for t in tensors]


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Samples:
    """Numbers of plain tensors as they were when this was made. It keeps no tensor alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        is_native, on_host = cpu.refusal() is None, []
        # Of tensors that torch must read, as those on a GPU: their places, and the sizes and strides of `spread`.
        self._elsewhere: dict[Any, list[tuple[int, Any, Any]]] = {}
        with torch.no_grad():
            for place, tensor in enumerate(tensors):
                if not _is_read(tensor) or not tensor.data_ptr():
                    continue
                view = spread(tensor)
                if is_native and tensor.is_cpu:
                    on_host.append(view)
                else:
                    of_kind = self._elsewhere.setdefault((tensor.device, tensor.dtype), [])
                    of_kind.append((place, view.shape, view.stride()))
        self._table = SampleTable(on_host)
        self._bytes, self._numbers = self._table.read(), self._read_elsewhere(tensors)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the same tensors, which are where they were, have the same numbers."""
        return self._table.read() == self._bytes and are_equal(self._read_elsewhere(tensors), self._numbers)

    @torch.no_grad()
    def _read_elsewhere(self, tensors: Sequence[Tensor]) -> dict[Any, Tensor]:
        found = {}
        for kind, places in self._elsewhere.items():
            parts = [_numbers(tensors[place]).as_strided(size, stride) for place, size, stride in places]
            found[kind] = _bits(torch.cat(parts if kind[1] in JOINED else [_bits(part) for part in parts]))
        return found


@torch.no_grad()
def samples(tensors: Iterable[Tensor]) -> dict[Any, Tensor]:
    """Return the bits of numbers that are spread over each tensor, by device and dtype [numbers of all tensors]."""
    found: dict[Any, list[Tensor]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in filter(_is_read, tensors):
            sample = spread(tensor)
            found.setdefault((sample.device, sample.dtype), []).append(sample)
        return {key: torch.cat(parts) for key, parts in found.items()}


def are_equal(numbers: dict[Any, Tensor], others: dict[Any, Tensor]) -> bool:
    """Return whether two results of `samples` are the same."""
    return numbers.keys() == others.keys() and all(torch.equal(each, others[key]) for key, each in numbers.items())


def _is_read(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.is_quantized


def spread(tensor: Tensor) -> Tensor:
    """Return up to SAMPLES numbers of a tensor, from its first to its last, as integers [n]: a view."""
    tensor = _numbers(tensor)
    length = tensor.numel() if tensor.is_contiguous() else _reach(tensor)
    # An odd step, because rows have even lengths: numbers of one column alone would say little.
    step = max(1, length // SAMPLES - 1) | 1
    count = min(SAMPLES, 1 + (length - 1) // step)
    return _bits(tensor.as_strided((count,), (step,)))


def _numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGER_DTYPES[tensor.dtype.itemsize])


def _reach(tensor: Tensor) -> int:
    """Return how far the last number of a tensor is from its first in memory, and one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# -- quantized weights -------------------------------------------------------------------------------------


def watched_tensors(packed: Any) -> Iterator[Tensor]:
    """Return the tensors that a packed weight is made of, without those that it keeps of its last call."""
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, list):
        for part in packed[:: max(1, len(packed) - 1)]:  # the first and the last of many experts
            yield from watched_tensors(part)
    else:
        kind: Any = type(packed)
        for name in stored_fields(kind):
            yield from watched_tensors(getattr(packed, name))


def reader_of(packed: Any) -> Callable[[Any], Iterable[Any]]:
    """Return what gives the tensors of a packed weight, and what stands in places where another one may have tensors;
    cheap where it has no list. It raises AttributeError for a weight of another form.
    """
    names = list(_leaves(packed))
    return attrgetter(*names) if len(names) > 1 and None not in names else watched_tensors


def _leaves(packed: Any, name: str = "") -> Iterator[str | None]:
    """Return the names of the tensors and plain values in a packed weight, with dots; None for a list."""
    fields = stored_fields(type(packed))
    if not fields:
        yield None if isinstance(packed, list) else name
    for each in fields:
        yield from _leaves(getattr(packed, each), f"{name}.{each}" if name else each)


@lru_cache(maxsize=4096)
def stored_fields(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass that say what it is, without what it keeps of its last call."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(field.name for field in fields if field.compare)
