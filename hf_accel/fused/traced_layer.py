"""A traced decoder layer: the values that it depends on, and the calls that it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.group import KVStorage
from ..recognition.operation import OUTPUT, Operation, UntraceableError
from ..recognition.trace import Trace
from ..recognition.unchanged import GLOBAL_HOOKS, Read, Reads
from ..tensors import PLAIN
from ..undo.state import FUSED
from .modules import RotaryForm, form_of_rotation
from .norms import NativeNorm, NormForm
from .partial_rotation import leaves_rest


class Attention(NamedTuple):
    """The attention of a layer's attend operation. window: in tokens, None for all."""

    scale: float
    softcap: float | None
    window: int | None


class TracedForms:
    """The norms and rotations of a trace that was taken with tensors of one dtype, for calls on `device`.

    table_dtype: of cos and sin; None if the layer reads none. reads: the values that must not change.
    """

    dtype: torch.dtype
    table_dtype: torch.dtype | None
    device: torch.device
    reads: list[Read]

    def norm_form(self, operation: Operation) -> NormForm:
        """Raises UntraceableError for a norm that has no native call."""
        (module,) = operation.modules
        own, weight = vars(module), module._parameters["weight"]
        form: NormForm | None = None
        if isinstance(module, NativeNorm):
            example = torch.empty(1, operation.values["dim"], dtype=self.dtype, device=self.device)
            form = own[FUSED].form(module, example)
        if form is None or weight is None or not weight.is_contiguous():
            raise UntraceableError("a norm has no native call")
        if form.round_first and torch.promote_types(self.dtype, weight.dtype) is not self.dtype:
            raise UntraceableError("a norm changes the dtype")
        self.reads += [Read(own, name, own.get(name)) for name in ("eps", "variance_epsilon")]
        self.reads.append(Read(module._parameters, "weight", weight))
        return form

    def rotary_form(self, operation: Operation) -> RotaryForm:
        """Raises UntraceableError for a rotation that has no native call."""
        values, form = operation.values, None
        if self.table_dtype is not None:
            form = form_of_rotation(values["function"], self.dtype, self.table_dtype, self.device.type)
        if form is None or (values["partial"] and not leaves_rest(values["function"])):
            raise UntraceableError("its rotation has no native call")
        return form


class TracedLayer(TracedForms):
    """A layer whose trace was taken with tensors of one dtype, and tables of `table_dtype`, for calls on `device`.
    The code of a layer without tables gets none.

    max_tokens: the most tokens of a call. reads: the values that must not change, those that the trace read among
    them.
    """

    max_tokens: int

    def __init__(
        self, trace: Trace, table_dtype: torch.dtype | None, attention: Attention, device: torch.device
    ) -> None:
        assert trace.layer_idx is not None
        self.dtype, self.table_dtype, self.attention, self.device = trace.dtype, table_dtype, attention, device
        self.layer_idx, self.returns_tuple = trace.layer_idx, trace.returns_tuple
        self.reads = trace.reads
        self.width, self.table_size = trace.widths[OUTPUT], trace.table_size
        self._hooks = [*trace.hooks, *GLOBAL_HOOKS]
        kv = next(operation.values for operation in trace.operations if operation.kind == "write")
        # Empty K and V, with the shape and the dtype of those that are written.
        shapes = [(0, kv["heads"], kv[size]) for size in ("dim", "value_dim")]
        self.written = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]

    # -- while it is made ------------------------------------------------------------------------------

    @property
    def limits(self) -> tuple[object, ...]:
        """The sizes that `takes` and `fits` compare, besides dtypes and the device."""
        return self.width, self.max_tokens, self.attention.window, *(tensor.shape for tensor in self.written)

    def freeze_reads(self) -> None:
        """End the collection of `reads`; called when all that the layer depends on is in them."""
        self._frozen = Reads(self.reads)

    # -- while it is used ------------------------------------------------------------------------------

    def is_current(self) -> bool:
        return self._frozen.hold()

    def is_unobserved(self) -> bool:
        """Return whether no hook or replaced forward would notice that the modules are not called."""
        return not any(self._hooks)

    def takes(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, *, tokens: int) -> bool:
        """Return whether the tensors of a pass over so many tokens have the shapes that the trace is for."""
        if x.ndim != 3 or (tables is None) is not (self.table_dtype is None):
            return False
        batch, row, size = x.shape
        return (
            size == self.width
            and batch * row == tokens
            and 0 < tokens <= self.max_tokens
            and x.is_contiguous()
            and x.device == self.device
            and (tables is None or self._takes_tables(*tables, batch=batch, row=row))
        )

    def _takes_tables(self, cos: Tensor, sin: Tensor, *, batch: int, row: int) -> bool:
        if cos.ndim != 3:
            return False
        size = self.written[0].shape[2] if self.table_size is None else self.table_size
        return (
            cos.shape[0] in (1, batch)
            and cos.dtype is sin.dtype
            and cos.shape == sin.shape == (cos.shape[0], row, size)
            and type(cos) in PLAIN
            and type(sin) in PLAIN
            and cos.device == sin.device == self.device
        )

    def fits(self, storage: KVStorage) -> bool:
        """Return whether the pages hold K and V as the layer writes them, and attention reads them."""
        pages, (keys, values) = storage.pages, self.written
        dims = (pages.k.shape[1], pages.key_dim, pages.value_dim)
        same = storage.dtype is self.dtype and pages.k.device == self.device
        return same and dims == (*keys.shape[1:], values.shape[2])
