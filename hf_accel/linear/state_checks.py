"""The part of a weight that a process holds, and what a quantized layer refuses in a state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .formats import QuantizedWeight, converts, state


class RankPart(NamedTuple):
    """The part of a weight that is split over processes: that of one process."""

    rank: int
    ranks: int

    def __str__(self) -> str:
        return f"rank_{self.rank}_of_{self.ranks}"


def wrong_part(state_dict: Mapping[str, Any], prefix: str, own: str) -> list[str]:
    """Refuse the parts of other ranks, and whole weights, which torch would ignore if it is not strict.

    own: the prefix of the layer's tensors, which is longer than `prefix` for a part of a weight.
    """
    if own == prefix:
        wrong = [key for key in state_dict if key.startswith(f"{prefix}rank_")]
    else:
        wrong = [key for key in state_dict if key.startswith(prefix) and not key.startswith(own)]
    return [
        f"{key} is not for this model, which stores {own}weight; give each rank what the same rank of as many has "
        "saved, or patch a model that has read the float checkpoint"
        for key in wrong[:1]
    ]


def wrong_dtypes(weight: QuantizedWeight, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """Refuse a float weight, which torch would copy into the stored numbers as if its scales were 1."""
    stored, kind = state(weight).items(), weight.layout.label.upper()
    loaded = [(name, own, state_dict[prefix + name]) for name, own in stored if prefix + name in state_dict]
    return [
        f"{prefix}{name} is {other.dtype} in the checkpoint, but an {kind} layer stores {own.dtype}; "
        "load a checkpoint that was saved quantized"
        for name, own, other in loaded
        if (converts(own), own.is_floating_point()) != (converts(other), other.is_floating_point())
    ]
