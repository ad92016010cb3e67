"""Adapters of requests (LoRA, Hu et al. 2021): in the rows of a request, linear layers return b (a x) more.

The layers stay as they are. A pass in which a request has an adapter carries a PassAdapters: native calls of whole
layers add the products themselves, and other layers have hooks for the time of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.prefixes import content_number
from ..errors import UnsupportedError
from ..hardware.large_pages import in_large_pages
from ..kernels.cpu.integer_linear import by_block, by_output
from ..kernels.cpu.library import FLOATS, refusal
from ..kernels.cpu.low_rank import PartTable, RowGroups, adapt, part_fields

LINE = 64  # bytes of a cache line


def whole_lines(size: int) -> int:
    return -(-size // LINE) * LINE


class LowRankPart:
    """The product that an adapter adds to what one linear layer returns: scale * b (a x).

    a: [rank, in]. b: [out, rank], of one dtype. They are held as the CPU's kernel reads them, elsewhere as they are.
    """

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        self.sizes, self.scale = (a.shape[1], len(b)), scale
        self._hold(*((by_block(a.T), by_block(b)) if a.is_cpu else (a.T, b)))

    def _hold(self, a: Tensor, b: Tensor) -> None:
        self._packed, self.fields = (a, b), part_fields(a, b, self.scale)

    @staticmethod
    def put_together(parts: Iterable[LowRankPart]) -> None:
        """Move the matrices of parts on a CPU to one memory, which is read faster."""
        parts = [part for part in parts if part._packed[0].is_cpu]
        memory, start = in_large_pages(sum(whole_lines(each.nbytes) for part in parts for each in part._packed)), 0
        for part in parts:
            moved = []
            for each in part._packed:
                moved.append(memory[start : start + each.nbytes].view(each.dtype).view(each.shape).copy_(each))
                start += whole_lines(each.nbytes)
            part._hold(*moved)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._packed)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in] -> [n, out] float32. This is the reference of the kernel."""
        a, b = self._packed
        if a.is_cpu:
            a, b = (by_output(each, size) for each, size in zip(self._packed, self.sizes, strict=True))
        return (x.float() @ a.float() @ b.float().T) * self.scale


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that requests can ask for.

    parts: what it adds, by the linear layer. outside: those of these layers that no native call of a whole layer
    computes. salt: says what the adapter is; keys and values that were computed with it are known by it.
    """

    name: str
    parts: Mapping[nn.Module, LowRankPart]
    outside: frozenset[nn.Module]
    salt: bytes
    number: int = field(default_factory=itertools.count().__next__)  # another one for each

    @property
    def num_bytes(self) -> int:
        """The bytes of its matrices in memory."""
        return sum(part.num_bytes for part in self.parts.values())

    def contents(self, known: list[int]) -> list[int]:
        """Return the numbers by which the prefix index knows tokens that this adapter has changed.

        known: the same without it. Since a prefix is known by all of its numbers, it is enough that the first one
        differs.
        """
        return [content_number(self.salt, repr(known[0]).encode()), *known[1:]] if known else known


class PassAdapters:
    """The adapters of the rows of one pass, which runs in the thread that has made this."""

    def __init__(self, given: Iterable[tuple[Adapter, range]], num_rows: int) -> None:
        """given: adapters, and the rows that each one is for. num_rows: of the pass."""
        rows: dict[Adapter, list[int]] = {}
        for adapter, own in given:
            rows.setdefault(adapter, []).extend(own)
        self.adapters, self.num_rows = tuple(rows), num_rows
        self.numbers = [adapter.number for adapter in self.adapters]
        self.groups = RowGroups.of(list(rows.values()))
        self._rows = list(rows.values())
        self._indices: dict[torch.device, list[Tensor]] = {}
        self.num_added = 0  # parts, of all adapters and layers
        self._thread = get_ident()

    @staticmethod
    def of(adapters: Sequence[Adapter | None], counts: Sequence[int]) -> PassAdapters | None:
        """Return those of a pass; None if no row has one.

        adapters: those of its sequences. counts: how many rows each of these has.
        """
        if not any(adapters):
            return None
        ends = itertools.accumulate(counts)
        rows = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
        given = [(adapter, own) for adapter, own in zip(adapters, rows, strict=True) if adapter is not None]
        return PassAdapters(given, rows[-1].stop)

    def check_added(self) -> None:
        """Raise UnsupportedError unless the pass, which has ended, added each adapter to each of its layers once."""
        expected = sum(len(adapter.parts) for adapter in self.adapters)
        if self.num_added != expected:
            raise UnsupportedError(
                f"a pass has added {self.num_added} of {expected} parts of the adapters "
                f"{[adapter.name for adapter in self.adapters]}, because it has not called each of their layers once; "
                "if the model was changed since they were loaded, unload them and load them again"
            )

    def table(self, layers: Sequence[nn.Module]) -> PartTable:
        """Return the parts of the adapters for these layers."""
        fields = [[None if (part := each.parts.get(layer)) is None else part.fields for layer in layers]
                  for each in self.adapters]  # fmt: skip
        return PartTable.of(fields)

    @contextmanager
    def hooked(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Add to what those of the modules return that an adapter of the pass changes, within the block."""
        with ExitStack() as hooks:
            for module in modules:
                if any(module in adapter.parts for adapter in self.adapters):
                    hooks.callback(module.register_forward_hook(self._add).remove)
            yield

    @property
    def outside(self) -> set[nn.Module]:
        """The layers of the adapters that no native call of a whole layer computes."""
        return set().union(*(adapter.outside for adapter in self.adapters))

    def _add(self, module: nn.Module, given: tuple[Any, ...], out: Any) -> Tensor | None:
        """Change what a layer has returned: a forward hook."""
        if get_ident() != self._thread:  # another thread calls the model meanwhile
            return None
        if not isinstance(out, Tensor):  # a router may be a linear layer that returns its choice too
            raise UnsupportedError(
                f"a {type(module).__name__} returns a {type(out).__name__}, and adapters add to products of linear "
                "layers; load an adapter that leaves this layer as it is"
            )
        x = given[0].reshape(-1, given[0].shape[-1])
        if len(x) != self.num_rows:
            raise UnsupportedError(
                f"a {type(module).__name__} was called on {len(x)} rows in a pass of {self.num_rows}, so that nobody "
                "knows which of them an adapter is for; load an adapter that leaves this layer as it is"
            )
        table = self.table([module])
        self.num_added += table.num_parts
        added = out.reshape(len(x), -1)
        added = added.clone() if added.data_ptr() == out.data_ptr() else added
        if x.is_cpu and refusal() is None and x.dtype is out.dtype and x.dtype in FLOATS:
            adapt(x if x.stride(1) == 1 else x.contiguous(), added, table, self.groups)
        else:
            self._add_by_torch(module, x, added)
        return added.view(out.shape)

    def _add_by_torch(self, module: nn.Module, x: Tensor, out: Tensor) -> None:
        if x.device not in self._indices:  # a copy to a GPU takes as long as a product there
            self._indices[x.device] = [torch.tensor(rows, device=x.device) for rows in self._rows]
        for adapter, index in zip(self.adapters, self._indices[x.device], strict=True):
            if (part := adapter.parts.get(module)) is not None:
                out[index] = (out[index].float() + part(x[index])).to(out.dtype)
