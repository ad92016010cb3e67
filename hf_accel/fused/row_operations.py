"""The operations that a layer over rows has besides: scores of positions, gates of a bias, and convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof
from typing import Any

from torch import Tensor, nn

from ..kernels.cpu.attention import bias_gates, position_scores
from ..kernels.cpu.library import ACTIVATIONS, DTYPES, FLOATS
from ..kernels.cpu.row_conv import row_conv, row_norm
from ..linear import QuantLinear
from ..recognition.operation import Kind, Operation, UntraceableError
from ..tensors import is_plain_tensor
from .native_operation import HeldRows, NativeOperation, NativeParts, Planned


class PositionScoresOperation(NativeOperation):
    """The scores of positions, which attention adds to its own."""

    def refusal(self, operation: Operation, planned: Planned) -> str | None:
        return None if planned.linears is not None else "its positions have no native call"

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        if not parts.over_rows:
            raise UntraceableError("its positions have no native call over pages")
        return {name: operation.values[name] for name in ("heads", "dim", "scale")}

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        assert rows.positions is not None
        heads, dim = operation.values["heads"], operation.values["dim"]
        q, k = (rows.heads(span, heads, dim) for span in operation.inputs)
        starts, scale = rows.layout.ragged.cu_q, operation.values["scale"]
        rows.bias = position_scores(q, k, rows.positions, starts, scale=scale)
        return []


class BiasGatesOperation(NativeOperation):
    """The numbers that a bias of scores is multiplied by, float32."""

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        if not parts.over_rows:
            raise UntraceableError("the gates of its bias have no native call over pages")
        weight, bias, factors = self._tensors(operation, parts)
        values = operation.values
        return {
            "weight": parts.address(weight), "bias": 0 if bias is None else parts.address(bias),
            "skip": parts.address(factors), "weight_dtype": DTYPES[weight.dtype],
            "heads": values["heads"], "dim": values["dim"], "value_dim": values["terms"],
        }  # fmt: skip

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        x = rows.columns(operation.inputs[0], operation.values["heads"] * operation.values["dim"])
        return [bias_gates(x, *self._tensors(operation, rows.parts))]

    def _tensors(self, operation: Operation, parts: NativeParts) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the weight and the bias of the linear layer, and the factors of heads. Raises UntraceableError."""
        linear, module = operation.modules
        own, parameters, name = vars(linear), linear._parameters, operation.values["factors"]
        factors = module._parameters[name]
        if type(linear) is QuantLinear:
            parts.note(own, "_packed")
            parts.note(own, "writes")
            weight: Any = linear.quantized.dequantize(parts.dtype).contiguous()
        else:
            parts.note(parameters, "weight")
            weight = parameters.get("weight")
        parts.note(parameters, "bias")
        parts.note(module._parameters, name)
        bias = parameters.get("bias")
        tensors = [each for each in (weight, bias, factors) if each is not None]
        plain = all(is_plain_tensor(each) and each.is_cpu and each.is_contiguous() for each in tensors)
        if not plain or len({each.dtype for each in tensors}) > 1 or weight.dtype not in FLOATS or factors is None:
            raise UntraceableError("the gates of its bias have no native call")
        return weight, bias, factors


class RowConvolutionOperation(NativeOperation):
    """A convolution of each channel over the rows of a sequence, with a BatchNorm and an activation behind it."""

    def refusal(self, operation: Operation, planned: Planned) -> str | None:
        return None if planned.device_type == "cpu" else "a convolution has no native call"

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        if not parts.over_rows:
            raise UntraceableError("a convolution has no native call over pages")
        convolution, *norms = operation.modules
        values = operation.values
        weight, bias = self._parameters(convolution, ("weight", "bias"), parts)
        fields: dict[str, Any] = {
            "weight": parts.address(weight), "bias": 0 if bias is None else parts.address(bias),
            "dim": values["dim"], "value_dim": weight.shape[-1], "ahead": values["before"],
            "window": values["masked"],
            "activation": ACTIVATIONS[values["activation"]] if "activation" in values else -1,
        }  # fmt: skip
        for norm in norms:
            held = row_norm(self._norm(norm, parts), vars(norm)["eps"])
            parts.norms.append(held)
            parts.note(vars(norm), "eps")
            fields["skip"] = addressof(held)
        return fields

    def compute(self, operation: Operation, rows: HeldRows) -> list[Tensor]:
        convolution, *norms = operation.modules
        values, layout = operation.values, rows.layout
        x = rows.columns(operation.inputs[0], values["dim"])
        lengths = layout.ragged.kv_len if values["masked"] and layout.keys is not None else None
        weight, bias = (convolution._parameters.get(name) for name in ("weight", "bias"))
        assert weight is not None
        norm = row_norm(self._norm(norms[0], rows.parts), vars(norms[0])["eps"]) if norms else None
        behind, starts = (norm, values.get("activation")), layout.ragged.cu_q
        return [row_conv(x, weight, bias, (starts, lengths), before=values["before"], behind=behind)]

    def _norm(self, norm: nn.Module, parts: NativeParts) -> list[Tensor]:
        names = ("running_mean", "running_var")
        found = [
            *self._parameters(norm, names, parts, kept="_buffers"),
            *self._parameters(norm, ("weight", "bias"), parts),
        ]
        if any(each is None for each in found):
            raise UntraceableError("a norm has no native call")
        return found

    def _parameters(
        self, module: nn.Module, names: tuple[str, str], parts: NativeParts, *, kept: str = "_parameters"
    ) -> list[Any]:
        """Return tensors of a module that are read in place. Raises UntraceableError."""
        held, found = vars(module)[kept], []
        for name in names:
            parts.note(held, name)
            tensor = held.get(name)
            plain = tensor is None or (is_plain_tensor(tensor) and tensor.is_cpu and tensor.dtype is parts.dtype)
            if not plain or name not in held or (tensor is not None and not tensor.is_contiguous()):
                raise UntraceableError("a convolution or its norm has no native call")
            found.append(tensor)
        return found


class ByPositionOperation(NativeOperation):
    """x times a number of each token, by its position, which stands behind its cos; see `behind_tables`."""

    over_rows = False

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        if parts.table_size is None or parts.over_rows:
            raise UntraceableError("numbers of its positions have no native call without tables")
        return {"dim": operation.values["dim"], "ahead": parts.table_size}


ROW_OPERATIONS: Mapping[Kind, NativeOperation] = {
    "by_position": ByPositionOperation(),
    "position_scores": PositionScoresOperation(),
    "bias_gates": BiasGatesOperation(),
    "row_conv": RowConvolutionOperation(),
}
