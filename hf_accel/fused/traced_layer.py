"""The conditions of a traced decoder layer: what it depends on, and the calls that its trace stands for."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cache.group import KVStorage
from ..kernels.cpu.decoder_layer import OUTPUT
from ..recognition.stand_ins import UntraceableError
from ..recognition.unchanged import GLOBAL_HOOKS, Read, Reads
from ..tensors import PLAIN
from ..undo.state import FUSED
from .forms import NormForm, RotaryForm, form_of_rotation, norm_form
from .modules import NativeNorm
from .traced import Operation, Trace, original_class


class Attention(NamedTuple):
    """The attention of a layer's attend operation. window: in tokens, None for all."""

    scale: float
    softcap: float | None
    window: int | None


class TracedLayer:
    """A layer whose trace was taken with tensors of one dtype, and tables of `table_dtype`, for calls on `device`.

    max_tokens: the most tokens of a call. reads: the values that must not change, those that the trace read among
    them.
    """

    max_tokens: int

    def __init__(self, trace: Trace, table_dtype: torch.dtype, attention: Attention, device: torch.device) -> None:
        assert trace.layer_idx is not None
        self.dtype, self.table_dtype, self.attention, self.device = trace.dtype, table_dtype, attention, device
        self.layer_idx, self.returns_tuple = trace.layer_idx, trace.returns_tuple
        self.reads = trace.reads
        self.width = trace.widths[OUTPUT]
        self._hooks = [*trace.hooks, *GLOBAL_HOOKS]
        kv = next(operation.values for operation in trace.operations if operation.kind == "write")
        # K and V of no token, which show the shape and dtype of what is written.
        shapes = [(0, kv["heads"], kv[size]) for size in ("dim", "value_dim")]
        self.written = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]

    # -- while it is made ------------------------------------------------------------------------------

    def norm_form(self, operation: Operation) -> NormForm:
        """Raises UntraceableError for a norm that has no native call."""
        (module,) = operation.modules
        own, weight = vars(module), module._parameters["weight"]
        form: NormForm | None = None
        if isinstance(module, NativeNorm):
            example = torch.empty(1, operation.values["dim"], dtype=self.dtype, device=self.device)
            form = own[FUSED].form(module, original_class(module), example)
        if form is None or weight is None or not weight.is_contiguous():
            raise UntraceableError("a norm has no native call")
        if form.round_first and torch.promote_types(self.dtype, weight.dtype) is not self.dtype:
            raise UntraceableError("a norm changes the dtype")
        self.reads += [Read(own, name, own.get(name)) for name in ("eps", "variance_epsilon")]
        self.reads.append(Read(module._parameters, "weight", weight))
        return form

    def rotary_form(self, operation: Operation) -> RotaryForm:
        """Raises UntraceableError for a rotation that has no native call."""
        form = form_of_rotation(operation.values["function"], self.dtype, self.table_dtype, self.device.type)
        if form is None:
            raise UntraceableError("its rotation has no native call")
        return form

    def freeze_reads(self) -> None:
        """End the collection of `reads`; called when all that the layer depends on is in them."""
        self._frozen = Reads(self.reads)

    # -- while it is used ------------------------------------------------------------------------------

    def is_current(self) -> bool:
        return self._frozen.hold()

    def is_unobserved(self) -> bool:
        """Return whether no hook or replaced forward would notice that the modules are not called."""
        return not any(self._hooks)

    def takes(self, x: Tensor, cos: Tensor, sin: Tensor, *, tokens: int) -> bool:
        """Return whether the tensors of a pass over so many tokens are those that the trace stands for."""
        if x.ndim != 3 or cos.ndim != 3:
            return False
        batch, row, size = x.shape
        table = (cos.shape[0], row, self.written[0].shape[2])
        return (
            size == self.width
            and batch * row == tokens
            and 0 < tokens <= self.max_tokens
            and cos.shape[0] in (1, batch)
            and x.is_contiguous()
            and cos.dtype is sin.dtype
            and cos.shape == sin.shape == table
            and type(cos) in PLAIN
            and type(sin) in PLAIN
            and cos.device == sin.device == x.device == self.device
        )

    def fits(self, storage: KVStorage) -> bool:
        """Return whether the pages hold K and V as the layer writes them, and attention reads them."""
        pages, (keys, values) = storage.pages, self.written
        dims = (pages.k.shape[1], pages.key_dim, pages.value_dim)
        same = storage.dtype is self.dtype and pages.k.device == self.device
        return same and dims == (*keys.shape[1:], values.shape[2])


def refuse_without_kernel(trace: Trace, linears: Container[nn.Module] | None, device_type: str = "cpu") -> None:
    """Raise UntraceableError for what a TracedLayer would refuse in a layer that is still to be patched.

    linears: the linear layers that will have a native call; None where they are called as modules.
    """
    for operation in trace.operations:
        match operation.kind:
            case "linear" | "gated":
                if linears is not None and not all(module in linears for module in operation.modules):
                    raise UntraceableError("a linear layer has no native call")
            case "norm" if norm_form(operation.modules[0], dtype=trace.dtype) is None:
                raise UntraceableError("a norm has no native call")
            case "rope":
                function = operation.values["function"]
                if form_of_rotation(function, trace.dtype, trace.dtype, device_type) is None:
                    raise UntraceableError("its rotation has no native call")
