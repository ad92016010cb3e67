"""Moves what a pass needs from the host to a device, in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from .group import GroupStep, Step

ALIGNMENT = 16  # bytes; Triton makes better code for pointers that are multiples of it


@dataclass(frozen=True)
class PassInputs:
    """The tensors of a pass over N tokens. All are on one device.

    ids, positions: [N] int64. keep: [K] int64, the indices of the tokens whose logits are wanted. step: see Step.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    step: Step

    @property
    def tensors(self) -> list[Tensor]:
        groups = self.step.groups
        # All groups have the same queries, so one cu_q.
        found = [self.ids, self.positions, self.keep, *(group.slots for group in groups)]
        found += [group.written for group in groups if group.written is not None]
        found += [groups[0].ragged.cu_q, *(group.ragged.kv_len for group in groups)]
        return found + [group.ragged.block_table for group in groups if group.ragged.block_table is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> PassInputs:
        """Return the same pass with other tensors, in the order of `tensors`."""
        given, groups = iter(tensors), self.step.groups
        ids, positions, keep = next(given), next(given), next(given)
        slots = [next(given) for _ in groups]
        written = [None if group.written is None else next(given) for group in groups]
        cu_q, kv_len = next(given), [next(given) for _ in groups]
        tables = [None if group.ragged.block_table is None else next(given) for group in groups]
        moved = [
            GroupStep(
                slots[i],
                written[i],
                group.ragged._replace(cu_q=cu_q, kv_len=kv_len[i], block_table=tables[i]),
                None if group.own is None else group.own.to(ids.device),
            )
            for i, group in enumerate(groups)
        ]
        return PassInputs(ids, positions, keep, replace(self.step, groups=moved))

    def to(self, device: torch.device) -> PassInputs:
        """Return the same pass on `device`, copied there at once. The tensors are on the host before."""
        if device.type == "cpu":
            return self
        tensors = self.tensors
        return self.with_tensors(views(packed(tensors, device).to(device, non_blocking=True), tensors))


def packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of tensors of the host, one after the other, as uint8, in memory that `device` can copy from by
    itself.
    """
    starts = _starts(tensors)
    # torch reuses pinned memory only when the copies from it are done.
    buffer = torch.zeros(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    numbers = buffer.numpy()  # whose slices cost a fraction of a tensor's
    for start, tensor in zip(starts, tensors, strict=False):
        numbers[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return buffer


def views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose bytes `packed` put into a buffer. like: tensors of their shapes and dtypes."""
    starts = _starts(like)
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=False)
    ]


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    return [0, *accumulate(sizes)]
