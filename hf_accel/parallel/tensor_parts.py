"""The part of a DTensor that a rank holds, and how its memory is freed and filled again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors import is_sharded


@dataclass(frozen=True)
class Part:
    """Spans of a whole tensor along one dimension; a rank's tensor holds them one after the other."""

    dim: int
    spans: tuple[tuple[int, int], ...]

    def read(self, stored: Any) -> Tensor:
        """Read the part of a tensor, or of a slice that safetensors has not read yet, without reading the rest."""
        before = (slice(None),) * self.dim
        pieces = [stored[(*before, slice(*span))] for span in self.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def part_of(tensor: Any) -> Part | None:
    """Return the part that this rank holds of an evenly split DTensor; None for a tensor that is whole here."""
    if not is_sharded(tensor) or not hasattr(tensor.placements[0], "dim"):
        return None
    placement, mesh = tensor.placements[0], tensor.device_mesh
    dim = placement.dim % tensor.ndim
    blocks = int(getattr(placement, "split_factor", 1))  # of a weight that several are packed in, each split by itself
    block = tensor.shape[dim] // blocks
    size, rank = block // mesh.size(), mesh.get_local_rank()
    starts = [number * block + rank * size for number in range(blocks)]
    return Part(dim, tuple((start, start + size) for start in starts))


def let_go(parameter: Any) -> None:
    """Free a parameter's memory. The object stays, and so does every reference to it."""
    put_back(parameter, torch.empty(0, dtype=parameter.dtype, device=parameter.device))


def put_back(parameter: Any, tensor: Tensor) -> None:
    """Fill a parameter again with its numbers, or with this rank's part of them."""
    if is_sharded(parameter):
        parameter._local_tensor = tensor  # what __tensor_flatten__ names
    else:
        parameter.data = tensor
