"""Activations that read a part of a wider tensor, which torch may round in another way than a tensor of their own.

The exact GELU of torch is oneDNN's where its input is contiguous, and torch's own where it is not. Half of the columns
of one row are contiguous, and those of two rows are not: so a token's bits would depend on the other tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...models import modules_by_name
from ...recognition.source import without_renaming
from ...recognition.trial import RandomNumbers
from ...recognition.unchanged import has_own_forward, is_known_class
from ...undo.journal import Mixin, original_class
from ..site import FusedSite, SiteKind

PART_ACTIVATION = SiteKind("part activation", "activations of parts", "as of whole tensors")
CUTS = frozenset({"chunk", "split"})  # what code calls to cut a tensor into parts


class PartActivation(Mixin):
    """A mixin for an activation: it computes a part of a tensor as a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]."""
        result: Tensor = super().forward(x.contiguous())  # type: ignore[misc]
        return result


def part_activations(model: nn.Module) -> Iterator[FusedSite]:
    """Find activations of modules that cut tensors, which torch rounds by the layout of their input."""
    for name, parent in modules_by_name(model):
        code = getattr(without_renaming(original_class(parent).forward), "__code__", None)
        if code is None or CUTS.isdisjoint(code.co_names):
            continue
        for key, child in parent.named_children():
            if not (has_own_forward(child) or next(child.parameters(), None) is not None) and rounds_by_layout(child):
                yield FusedSite(f"{name}.{key}" if name else key, child, PART_ACTIVATION, PartActivation, None)


@torch.no_grad()
def rounds_by_layout(module: Any) -> bool:
    """Return whether a module of a known package gives a part of a tensor other bits than a tensor of its own."""
    if not is_known_class(original_class(module)) or module._modules or module._buffers:
        return False
    part = (RandomNumbers()(8, 256) * 3)[:, :128]
    try:
        return any(
            not torch.equal(module(numbers), module(numbers.contiguous()))
            for numbers in (part.to(dtype) for dtype in (torch.float32, torch.bfloat16))
        )
    except Exception:  # another signature, or another kind of input: it is no activation
        return False
