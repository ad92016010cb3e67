"""Spend a budget of bits where 4 bits would hurt most, as measured on calibration data, or on the weights alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...errors import UnsupportedError
from ...fused.hf.sites import projection_sites
from ...linear.methods import rtn
from ...models import evaluating
from ..plan import Plan
from ..twin import twin
from ..weight_plan import WeightPlan
from .finished import Rounded
from .streaming import RoundingLinear
from .windows import check_takes_ids, windows_of

MEASURED_TOKENS = 256  # that the divergence is measured on, in windows of WINDOW_TOKENS
WINDOW_TOKENS = 128


@dataclass(frozen=True)
class Unit:
    """Linears that get the same bits, because other engines join them: those that are called on one tensor.

    divergence: from the float model's predictions in nats per token, with these alone in 4 bits; without calibration
    data, the share of the weights' squares that rounding to 4 bits changes. extra: bytes that 8 bits take more.
    """

    names: tuple[str, ...]
    divergence: float
    extra: int


def eight_bit_names(todo: Plan) -> frozenset[str]:
    """Return the Linears of a plan for 4 bits that get 8 bits within its average_bits: those that gain most per byte.

    average_bits are those of the weights, scales included, without the head. Raises UnsupportedError if 4 bits for all
    are more than that.
    """
    config = todo.config.weights
    if config is None or config.average_bits is None:
        return frozenset()
    linears, count, size = budget_of(todo.quantized)
    if not linears:
        return frozenset()
    left = config.average_bits * count / 8 - size
    if left < 0:
        raise UnsupportedError(
            f"average_bits={config.average_bits} is not enough: 4 bits for all linears that can have them, and their "
            f"scales, are {8 * size / count:.3f}; ask for more, or for larger groups"
        )
    check_takes_ids(todo.model)
    return best_within(sensitivities(todo.model, linears, windows_of(config.calibration, todo.model)), left)


def best_within(units: Iterable[Unit], left: float) -> frozenset[str]:
    """Return the Linears that gain most per byte, as many as `left` bytes are enough for."""
    chosen: list[str] = []
    for unit in sorted(units, key=lambda unit: -unit.divergence / unit.extra):
        if unit.extra <= left:
            left -= unit.extra
            chosen += unit.names
    return frozenset(chosen)


class Budget(NamedTuple):
    """The linears that a budget of bits is spent on, by name, and all numbers and bytes that it counts."""

    linears: dict[str, WeightPlan]
    numbers: int
    nbytes: int


def budget_of(weights: Iterable[WeightPlan]) -> Budget:
    """Return what a budget of bits is spent on.

    Neither the head nor what calibration does not reach is part of it. What has 8 bits already, since no group divides
    its inputs, is counted, and cannot get more.
    """
    counted = [p for p in weights if p.spec is not None and p.site.kind == "linears" and p.site.unreached is None]
    linears = {p.site.name: p for p in counted if p.config.bits < 8}
    return Budget(linears, sum(p.numbers for p in counted), sum(p.stored_bytes for p in counted))


@torch.no_grad()
def rounding_errors(
    model: PreTrainedModel, linears: Mapping[str, WeightPlan], read: Callable[[WeightPlan], Tensor | None]
) -> list[Unit]:
    """Return each unit of the Linears with what rounding to 4 bits does to its weights, which needs no data.

    Where nothing is known of the inputs, the error of an output is that of the weights: the outputs of a Linear change
    by the same share, if its inputs are independent. read: returns a weight [out, in]; None leaves its unit out.
    """
    return [
        Unit(names, error, _extra(linears, names))
        for names in logging.tqdm(list(units_of(model, linears)), desc="Rounding layers", unit=" units")
        if (error := _rounding_error([linears[name] for name in names], read)) is not None
    ]


def _rounding_error(linears: Sequence[WeightPlan], read: Callable[[WeightPlan], Tensor | None]) -> float | None:
    changed = total = 0.0
    for linear in linears:
        weight = read(linear)
        if weight is None:
            return None
        rounded = rtn.quantize(weight, linear.config).dequantize(torch.float32)
        changed += float((rounded - weight).square().sum())
        total += float(weight.float().square().sum())
    return changed / total if total else 0.0


@torch.no_grad()
def sensitivities(model: PreTrainedModel, linears: Mapping[str, WeightPlan], windows: Tensor) -> list[Unit]:
    """Return each unit of the Linears, with the loss when it alone is rounded to 4 bits, to nearest."""
    copy = twin(model)
    length = min(WINDOW_TOKENS, windows.shape[1])
    ids = windows.flatten()[: max(1, MEASURED_TOKENS // length) * length]
    ids = ids[: len(ids) // length * length].view(-1, length).to(model.device)
    with evaluating(copy):
        expected = _predictions(copy, ids)
        return [
            Unit(names, _divergence(copy, ids, expected, [linears[name] for name in names]), _extra(linears, names))
            for names in logging.tqdm(list(units_of(model, linears)), desc="Measuring layers", unit=" units")
        ]


def units_of(model: PreTrainedModel, linears: Mapping[str, WeightPlan]) -> Iterator[tuple[str, ...]]:
    """Yield the Linears in groups that are called on one tensor, and the others one by one."""
    joined: dict[str, tuple[str, ...]] = {}
    for site in projection_sites(model):
        names = tuple(name for name in site.layers if name in linears)
        joined |= dict.fromkeys(names, names)
    yield from dict.fromkeys(joined.get(name, (name,)) for name in linears)


def _to_nearest(linear: WeightPlan, inputs: Tensor) -> Rounded:
    return Rounded(rtn.quantize(linear.site.weight, linear.config), None)


def _divergence(copy: PreTrainedModel, ids: Tensor, expected: Tensor, linears: Sequence[WeightPlan]) -> float:
    before: dict[str, Any] = {linear.site.name: copy.get_submodule(linear.site.name) for linear in linears}
    for linear in linears:
        copy.set_submodule(linear.site.name, RoundingLinear(linear, _to_nearest))
    try:
        actual = _predictions(copy, ids)
    finally:
        for name, module in before.items():
            copy.set_submodule(name, module)
    return float((expected.exp() * (expected - actual)).sum(-1).mean(dtype=torch.float64))


def _predictions(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float().log_softmax(-1)


def _extra(linears: Mapping[str, WeightPlan], names: tuple[str, ...]) -> int:
    return sum(linears[name].with_eight_bits().stored_bytes - linears[name].stored_bytes for name in names)
