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
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def facts_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return what plain tensors are without their numbers, and how often torch knows of a write to them."""
    return [(t.dtype, t.shape, t.stride(), t.device, t.data_ptr(), version_of(t)) for t in tensors]


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Samples:
    """Numbers of plain tensors as they were when this was made. It keeps no tensor alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        places = [place for place, tensor in enumerate(tensors) if _is_read(tensor) and tensor.data_ptr()]
        is_native = cpu.refusal() is None
        on_host = {place for place in places if is_native and tensors[place].is_cpu}
        with torch.no_grad():
            self._table = SampleTable([spread(tensors[place]) for place in places if place in on_host])
        self._bytes = self._table.read()
        self._others = [place for place in places if place not in on_host]
        self._numbers = self._of_others(tensors)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the same tensors, which are where they were, have the same numbers."""
        return self._table.read() == self._bytes and are_equal(self._of_others(tensors), self._numbers)

    def _of_others(self, tensors: Sequence[Tensor]) -> dict[Any, Tensor]:
        return samples(tensors[place] for place in self._others)


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
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    length = tensor.numel() if tensor.is_contiguous() else _reach(tensor)
    # An odd step, because rows have even lengths: numbers of one column alone would say little.
    step = max(1, length // SAMPLES - 1) | 1
    count = min(SAMPLES, 1 + (length - 1) // step)
    view = tensor.as_strided((count,), (step,))
    return view.view(INTEGER_DTYPES[tensor.dtype.itemsize])


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
