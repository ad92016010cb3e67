"""Changes of a quantized layer's weight: what was added to it, and what brings the very weight back."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import HfAccelWarning
from .formats import QuantizedWeight

TAKEN_BACK = 0.25  # share of a change that may be left of it: rounding in bfloat16
ROUNDINGS = 4  # of the weight, in its dtype, that may be left of a change that was taken back exactly


class Changes:
    """Remembers what was added to a weight [out, in] and not taken out again, each as a sketch; true if anything was.

    The weights ahead of the first change and of the last one are kept, as long as these may be taken out again: an
    adapter that is merged and taken out leaves no trace. A copy, or a pickle, keeps the sketches alone.
    """

    def __init__(self) -> None:
        self.sketches: list[Tensor] = []  # [out]
        self.kept: dict[int, QuantizedWeight] = {}  # by the number of changes that are in the weight
        self._written: Tensor | None = None  # the weight as it was written last, ahead of its rounding, as a sketch

    def __bool__(self) -> bool:
        return bool(self.sketches)

    def shared(self) -> Self:
        """Return the changes of a second layer over the same weight."""
        other = copy.copy(self)
        other.sketches, other.kept = list(self.sketches), dict(self.kept)
        return other

    def forget(self) -> None:
        """Let the weights ahead of the changes go: these will not be taken out, or in another dtype."""
        self.kept, self._written = {}, None

    def note_other_weight(self) -> None:
        """Note a change that no later one takes back."""
        self.sketches.append(torch.zeros(1, device="cpu"))
        self.forget()

    def note(
        self, value: Tensor, before: Tensor, *, stored: QuantizedWeight, dtype: torch.dtype
    ) -> QuantizedWeight | None:
        """Note a change to `value`; returns the weight that was there ahead of the changes that it takes back.

        before, stored: the present weight, in float32 and as it is stored. dtype: of the layer.
        """
        first = self.kept.get(0)
        if first is not None and torch.equal(value, first.dequantize(dtype)):
            self.sketches.clear()
            self.forget()
            return first
        begins, end = [sketch_of(before), *([] if self._written is None else [self._written])], sketch_of(value)
        left, self._written = self._left(begins, end), end
        if left is None:
            count = len(self.sketches)
            self.sketches.append(end - begins[0])
            self.kept = {at: weight for at, weight in self.kept.items() if at == 0} | {count: stored}
            return None
        self.sketches.pop()
        found = self.kept.pop(len(self.sketches), None)
        if left > ROUNDINGS * torch.finfo(dtype).eps * before.norm():
            found = None
        if found is None:
            warn_of_rounding()
        if not self.sketches:
            self.forget()
        return found

    def _left(self, begins: list[Tensor], end: Tensor) -> Tensor | None:
        """Return what is left of the last change, a number, if the present one takes it back; None if it does not.

        begins: what the weight may have been for whoever changed it: the weight as it is, and as it was written last.
        end: what it became.
        """
        if not self.sketches:
            return None
        last = self.sketches[-1]
        left = torch.stack([(end - begin + last).norm() for begin in begins]).min()
        return left if left <= TAKEN_BACK * last.norm() else None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"kept": {}}


def sketch_of(weight: Tensor) -> Tensor:
    """Return the product [out] of a weight [out, in] and random numbers."""
    generator = torch.Generator("cpu").manual_seed(weight.shape[1])
    drawn = torch.randn(weight.shape[1], generator=generator, device="cpu")
    return weight.float() @ drawn.to(weight.device)


def warn_of_rounding() -> None:
    """Warn that a weight is not what it was, although what was added to it was taken out again."""
    warnings.warn(
        "an adapter was merged into quantized layers and taken out again: rounded twice, their weights are not "
        "exactly what they were; hf_accel.unpatch(model) and hf_accel.patch(model) bring these back",
        HfAccelWarning,
        stacklevel=6,
    )
