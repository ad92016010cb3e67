"""The products for each head that attention over compressed keys takes, as native calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..attention.expansion import KnownExpansion
from ..kernels.cpu.head_products import OF_OUTPUTS
from ..kernels.cpu.library import DTYPES
from ..linear import QuantLinear
from ..recognition.operation import Kind, Operation, UntraceableError
from ..recognition.unchanged import Read
from ..undo.state import FUSED
from .native_operation import NativeOperation, NativeParts, Planned


class HeadProductsOperation(NativeOperation):
    """The products of queries, or of results, with a part of the weight that makes keys and values."""

    over_rows = False

    def refusal(self, operation: Operation, planned: Planned) -> str | None:
        return None if planned.linears is not None else "compressed keys have no native call"

    def fields(self, operation: Operation, parts: NativeParts) -> dict[str, Any]:
        (linear, module), values = operation.modules, operation.values
        known = vars(module).get(FUSED)
        parts.note(vars(module), FUSED)
        for name in ("weight", "bias"):
            parts.note(linear._parameters, name)
        if type(linear) is QuantLinear:
            parts.note(vars(linear), "_packed")
            parts.reads.append(Read(vars(linear), "choice", linear.choice))
        expansion = known.expansion(module, parts.dtype) if isinstance(known, KnownExpansion) else None
        if expansion is None or not isinstance(known, KnownExpansion):
            raise UntraceableError("it makes keys and values by more than a product")
        parts.max_tokens = min(parts.max_tokens, known.most_rows(module))
        parts.tensors += [tensor for tensor in linear._parameters.values() if tensor is not None]
        transposed: int = values["transposed"]
        weight, scales = expansion.keys, expansion.key_scales
        if not transposed:
            weight, scales = expansion.values, expansion.value_scales
            transposed = 0 if not expansion.transposed else OF_OUTPUTS if scales is not None else 1
        fields = {name: values[name] for name in ("heads", "dim", "value_dim")} | {
            "weight": parts.address(weight), "weight_dtype": DTYPES[weight.dtype], "interleaved": transposed,
            "window": weight.stride(0) // weight.stride(1), "ahead": values["kept"],
        }  # fmt: skip
        return fields if scales is None else fields | {"skip": parts.address(scales)}


LATENT_OPERATIONS: Mapping[Kind, NativeOperation] = {"head_products": HeadProductsOperation()}
