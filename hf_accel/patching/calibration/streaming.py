"""One pass of the calibration data through a copy of the model, in which each Linear is quantized as it is reached.

A Linear sees what the quantized layers before it put out, as it will when the model runs ("true sequential" in GPTQ),
and what those after it get comes from its own quantized weight. So every layer is computed once, and no more than
the activations of one layer are held. The user's model is only read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ...errors import HfAccelWarning, UnsupportedError
from ...hardware import release
from ...linear.formats import QuantizedWeight
from ...linear.input_statistics import CHUNK_ROWS, Statistics
from ...linear.methods import awq, quantize
from ..pack import Packed, pack_quantized
from ..plan import Fold, Plan
from ..twin import twin
from ..weight_plan import WeightPlan
from .finished import Finished, Rounded
from .folds import foldable, folded_parameters
from .windows import check_takes_ids, feed, windows_of


@dataclass(frozen=True)
class Calibrated:
    """packed: weights by the names of their modules. folded: new parameters of modules that stay, by both names."""

    packed: dict[str, Packed]
    folded: dict[str, dict[str, Tensor]]


@torch.no_grad()
def calibrate(todo: Plan) -> Calibrated:
    """Quantize the weights whose method, in the plan, needs calibration.

    Weights that the data does not reach are left out, with a HfAccelWarning. Raises UnsupportedError for calibration
    data that is none, for a model that it cannot be fed to, and where it leads to NaN or infinity.
    """
    config, linears = todo.config.weights, {p.site.name: p for p in todo.calibrated}
    assert config is not None
    check_takes_ids(todo.model)
    windows = windows_of(config.calibration, todo.model)
    model = twin(todo.model)
    finished = Finished.of(config, windows, linears)
    with logging.tqdm(total=len(linears), desc=f"Quantizing by {config.method}", unit=" layers") as bar:
        run = CalibrationPass(todo, linears, finished, bar)
        for name, linear in linears.items():
            model.set_submodule(name, RoundingLinear(linear, run.quantize))
        feed(model, windows)
    _warn_of_missed([name for name in linears if name not in run.quantized])
    return run.result()


def _warn_of_missed(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"{len(names)} linear layers, {names[0]!r} first, are not reached by the calibration data; their weights "
            "are rounded to nearest",
            HfAccelWarning,
            stacklevel=8,  # the line that calls patch()
        )


class CalibrationPass:
    """The state of one pass of the data."""

    def __init__(self, todo: Plan, linears: Mapping[str, WeightPlan], finished: Finished, bar: Any) -> None:
        self._todo, self._linears, self._finished, self._bar = todo, linears, finished, bar
        self._fold_of = {name: fold for fold in todo.folds for name in fold.consumers}
        self.quantized: dict[str, Rounded] = {}
        self._scales: dict[Fold, Tensor] = {}
        self._inputs: Tensor | None = None
        self._version = 0
        self._statistics: Statistics | None = None

    def quantize(self, linear: WeightPlan, inputs: Tensor) -> Rounded:
        """Return the quantized weight of a Linear that is called on `inputs`."""
        name = linear.site.name
        rounded = self._finished.read(name)
        if rounded is None:
            try:
                rounded = self._quantize(linear, inputs)
            except UnsupportedError as error:
                raise UnsupportedError(f"{name!r} cannot be quantized: {error}") from error
            self._finished.write(name, rounded)
        fold = self._fold_of.get(name)
        if fold is not None and rounded.scales is not None:
            self._scales[fold] = rounded.scales
        self.quantized[name] = rounded
        release(linear.site.parameter)
        self._bar.update()
        return rounded

    def _quantize(self, linear: WeightPlan, inputs: Tensor) -> Rounded:
        statistics, fold = self._statistics_of(inputs), self._fold_of.get(linear.site.name)
        if fold is None:
            return Rounded(quantize(linear.site.weight, statistics, linear.config), None)
        if fold not in self._scales:
            weights = [self._linears[consumer].site.weight for consumer in fold.consumers]
            wanted = awq.channel_scales(weights, statistics, linear.config)
            self._scales[fold] = foldable(self._todo.model.get_submodule(fold.producer), wanted, fold.offset)
        scales = self._scales[fold]
        return Rounded(quantize(linear.site.weight, statistics.divided(scales), linear.config), scales)

    def _statistics_of(self, inputs: Tensor) -> Statistics:
        """Return the statistics of the last call if it was for the same tensor, since q, k and v are called on one."""
        if self._statistics is None or inputs is not self._inputs or inputs._version != self._version:
            self._statistics = self._inputs = None  # before there are others
            self._statistics = Statistics.of(inputs)
            self._inputs, self._version = inputs, inputs._version
        return self._statistics

    def result(self) -> Calibrated:
        """Return all that was quantized, packed, and the parameters that take the scales off again."""
        folded: dict[str, dict[str, Tensor]] = {}
        biases: dict[str, Tensor] = {}
        for fold, scales in self._scales.items():
            module = self._todo.model.get_submodule(fold.producer)
            parameters = folded_parameters(module, scales, fold.offset)
            if fold.offset is not None:
                folded[fold.producer] = parameters
                continue
            rounded = self.quantized[fold.producer]
            self.quantized[fold.producer] = replace(rounded, weight=with_outputs_divided(rounded.weight, scales))
            if "bias" in parameters:
                biases[fold.producer] = parameters["bias"]
        packed = {
            name: pack_quantized(self._linears[name], rounded.weight, self._todo.on_disk, bias=biases.get(name))
            for name, rounded in self.quantized.items()
        }
        return Calibrated(packed, folded)


def with_outputs_divided(weight: QuantizedWeight, scales: Tensor) -> QuantizedWeight:
    """Return a quantized weight [out, in] divided by scales [out], with the same integers."""
    stored = weight.weight_scale
    return weight.changed(weight_scale=(stored.float() / scales.unsqueeze(1)).to(stored.dtype))


class RoundingLinear(nn.Module):
    """Replaces a Linear of the copy: quantizes its weight on the first call, and multiplies by that."""

    def __init__(self, linear: WeightPlan, quantized: Callable[[WeightPlan, Tensor], Rounded]) -> None:
        """quantized: makes the weight, of a linear and the inputs of its first call."""
        super().__init__()
        self._linear, self._quantized = linear, quantized
        self._rounded: Rounded | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, such as sizes and weight, of the Linear that this one replaces."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._linear.site.module, name)

    def forward(self, x: Tensor) -> Tensor:
        if self._rounded is None:
            self._rounded = self._quantized(self._linear, x)
        return product(x, self._rounded, self._linear.site.bias)


def product(x: Tensor, rounded: Rounded, bias: Tensor | None) -> Tensor:
    """Multiply x [..., in] by a quantized weight, in float32, a few rows at a time -> [..., out] in x's dtype."""
    dense = rounded.weight.dequantize(torch.float32)
    if rounded.scales is not None:
        dense /= rounded.scales
    rows = x.flatten(0, -2)
    out = x.new_empty(len(rows), len(dense))
    for start in range(0, len(rows), CHUNK_ROWS):
        part = rows[start : start + CHUNK_ROWS].float() @ dense.t()
        out[start : start + CHUNK_ROWS] = part if bias is None else part.add_(bias.float())
    return out.view(*x.shape[:-1], -1)
