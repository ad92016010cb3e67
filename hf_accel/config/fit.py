"""fit=: a memory that a model has to fit into, as the user says it to load(), plan() and AccelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEPT = ("calibration", "skip")  # fields of weights= that say no bits


@dataclass(frozen=True)
class Fit:
    """A memory, and the fields of weights= that hold for whatever bits are chosen for it.

    memory: a size ("6GB"), a number of bytes, or a device, as `Estimate.fits` takes them.
    """

    memory: Any
    kept: Mapping[str, Any]


def take_fit(keywords: dict[str, Any]) -> Fit | None:
    """Take fit= out of a caller's keywords, with a weights= that says no bits; None where there is no fit=."""
    memory, weights = keywords.pop("fit", None), keywords.get("weights")
    if memory is None:
        return None
    says_no_bits = isinstance(weights, Mapping) and bool(weights) and weights.keys() <= set(KEPT)
    return Fit(memory, dict(keywords.pop("weights")) if says_no_bits else {})
