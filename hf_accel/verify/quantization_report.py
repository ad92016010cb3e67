"""A report on quantized weights: bits, bytes, perplexity, divergence from the float model, and the worst layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..linear import QuantModule
from ..linear.nf4 import is_nf4, stored_bytes
from ..models import evaluating, layer_lists
from ..patching.calibration.windows import windows_of
from ..patching.check import transformers_model
from ..patching.patch import stock_twin
from ..patching.printed import Line, Printed, table
from .cost import differences

WORST = 5  # layers that are printed


@dataclass(frozen=True)
class LayerReport:
    """A decoder layer.

    bits, weight_bytes: of its quantized weights, with scales; bits are 0 if no weight is quantized. error: of the
    hidden states after it, the norm of the difference relative to the float model's. added: how much more that is than
    before the layer.
    """

    name: str
    bits: float
    weight_bytes: int
    error: float
    added: float


@dataclass(frozen=True, repr=False)
class QuantizationReport(Printed):
    """The cost of a model's quantized weights: print() it, or read to_dict(), which is JSON-able.

    tokens: the number of predicted tokens. bits: the average of a quantized weight, scales included. weight_bytes,
    float_bytes: the size of the quantized weights, and of the same weights in floating point. change_percent: of the
    perplexity. kl: nats per token, of the float model's predictions from the quantized one's. Errors are standard
    errors of the mean over tokens.
    same_top: share of tokens where both find the same one likeliest.
    """

    tokens: int
    bits: float
    weight_bytes: int
    float_bytes: int
    float_perplexity: float
    perplexity: float
    change_percent: float
    change_error: float
    kl: float
    kl_error: float
    same_top: float
    layers: tuple[LayerReport, ...]

    @property
    def worst(self) -> list[LayerReport]:
        """The layers that add most to the error, first."""
        return sorted(self.layers, key=lambda layer: -layer.added)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        change = f"{self.change_percent:+.2f} % ± {self.change_error:.2f}"
        lines = [
            f"quantized weights: {self.bits:.2f} bits, {self.float_bytes / 1e6:,.1f} -> "
            f"{self.weight_bytes / 1e6:,.1f} MB",
            f"perplexity, {self.tokens:,} tokens: {self.float_perplexity:.4f} -> {self.perplexity:.4f}, {change}",
            f"KL from the float model: {self.kl:.5f} ± {self.kl_error:.5f} nats a token; "
            f"same likeliest token: {self.same_top:.1%}",
        ]
        worst = [
            Line(layer.name, f"{layer.bits:.2f}", f"{layer.error:.4f}", f"{layer.added:+.4f}")
            for layer in self.worst[:WORST]
        ]
        if worst:
            lines += table([Line("layers that add most", "bits", "error after", "added"), *worst])
        return "\n".join(lines)


@torch.no_grad()
def quantization_report(model: Any, ids: Any, *, reference: Any = None) -> QuantizationReport:
    """Compare a model with quantized weights and its float model on text that neither was calibrated on.

    ids: token ids [n, length], or texts, as WeightConfig(calibration=) takes them. reference: the float model; None:
        the patched model's own originals, which are read back where they were freed.

    Raises UnsupportedError for a model without quantized weights or without originals, and for ids that are none.
    """
    inner = transformers_model(model)
    layers: dict[str, Any] = {
        name: module for name, module in inner.named_modules() if isinstance(module, QuantModule) or is_nf4(module)
    }
    if not layers:
        raise UnsupportedError(f"{type(inner).__name__} has no quantized weights; patch it with weights='int4' first")
    other = stock_twin(inner) if reference is None else transformers_model(reference)
    windows = windows_of(ids, inner)
    if windows.shape[1] < 2:
        raise UnsupportedError("a window of one token predicts nothing; give windows of two tokens or more")
    with evaluating(inner, other):
        measured, errors = zip(*(_compare(inner, other, window) for window in windows.split(1)), strict=True)
    losses, expected, divergences, same = torch.cat(measured).unbind(1)
    change, change_error = _mean(losses - expected)
    kl, kl_error = _mean(divergences)
    size = sum(_bytes(layer) for layer in layers.values())
    count = sum(layer.in_features * layer.out_features for layer in layers.values())
    return QuantizationReport(
        tokens=len(losses),
        bits=8 * size / count,
        weight_bytes=size,
        float_bytes=count * other.dtype.itemsize,
        float_perplexity=math.exp(expected.mean()),
        perplexity=math.exp(losses.mean()),
        change_percent=100 * math.expm1(change),
        change_error=100 * change_error,
        kl=kl,
        kl_error=kl_error,
        same_top=float(same.mean()),
        layers=tuple(_layers(inner, layers, torch.stack(errors).mean(0))),
    )


def _compare(model: PreTrainedModel, reference: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compare both models on ids [1, n]: their `differences`, and the errors of hidden states after each layer."""
    outputs = [m(input_ids=ids.to(m.device), use_cache=False, output_hidden_states=True) for m in (model, reference)]
    actual, expected = (output.logits[0, :-1].float().cpu().log_softmax(-1) for output in outputs)
    states = zip(*(output.hidden_states for output in outputs), strict=True)
    errors = [
        float((a.double().cpu() - b.double().cpu()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in states
    ]
    return differences(actual, expected, ids[0, 1:]), torch.tensor(errors)


def _bytes(layer: Any) -> int:
    return layer.spec.weight_bytes if isinstance(layer, QuantModule) else stored_bytes(layer)


def _mean(values: Tensor) -> tuple[float, float]:
    """Return the mean and its standard error."""
    spread = float(values.std()) if len(values) > 1 else math.nan
    return float(values.mean()), spread / math.sqrt(len(values))


def _layers(model: PreTrainedModel, linears: dict[str, Any], errors: Tensor) -> Iterator[LayerReport]:
    """Describe each decoder layer. errors: those after the embedding and after each layer."""
    found = layer_lists(model, len(errors) - 1)
    if not found:
        return
    name = next(iter(found))
    for index in range(len(errors) - 1):
        inside = [layer for n, layer in linears.items() if n.startswith(f"{name}.{index}.")]
        size = sum(_bytes(layer) for layer in inside)
        count = sum(layer.in_features * layer.out_features for layer in inside)
        error, before = float(errors[index + 1]), float(errors[index])
        yield LayerReport(f"{name}.{index}", 8 * size / count if count else 0.0, size, error, error - before)
