"""A traced layer: the values that it depends on; and the calls that a decoder layer takes over pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.kinds.state_sizes import StateSizes
from ..cache.storage import KVStorage
from ..recognition.operation import OUTPUT, Operation, UntraceableError
from ..recognition.position_tables import OwnTables
from ..recognition.trace import Trace
from ..recognition.unchanged import GLOBAL_HOOKS, Read, Reads
from ..tensors import PLAIN
from ..undo.state import FUSED
from .modules import RotaryForm, form_of_rotation
from .norms import NativeNorm, NormForm, weight_of
from .partial_rotation import leaves_rest


class Attention(NamedTuple):
    """The attention of a layer's attend operation.

    window: how many keys up to its own a query sees, None for all. ahead: how many it sees after its own; 0 is causal.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    ahead: int = 0


class Traced:
    """A layer whose trace was taken with tensors of one dtype, and tables of `table_dtype`, for calls on `device`.
    The code of a layer without tables gets none.

    own_tables: cos and sin that the layer keeps, whose rows are those of the tokens' positions; None without.
    source: how keys of an encoder's output are computed, None if the layer attends to none. tried: see Record.
    reads: the values that must not change, those that the trace read among them. forms: of norms and rotations, by the
    id of the operation. write: the operation that writes keys and values to a cache, None if there is none.
    """

    def __init__(
        self, trace: Trace, table_dtype: torch.dtype | None, attention: Attention, device: torch.device
    ) -> None:
        rotations = (each.values for each in trace.operations if each.kind == "rope")
        self.own_tables: OwnTables | None = next((values.get("tables") for values in rotations), None)
        if self.own_tables is not None:
            table_dtype = self.own_tables.dtype
        self.dtype, self.table_dtype, self.attention, self.device = trace.dtype, table_dtype, attention, device
        self.others, self.width = trace.others, trace.widths[OUTPUT] // (trace.floats if trace.gives_wide else 1)
        self.out_dtype = torch.float32 if trace.gives_wide else trace.dtype
        self.operations, self.reads, self._hooks = trace.operations, trace.reads, [*trace.hooks, *GLOBAL_HOOKS]
        self.source, self.tried = trace.source, trace.tried
        self.write = next((operation for operation in trace.operations if operation.kind == "write"), None)
        self.forms: dict[int, NormForm | RotaryForm] = {}

    # -- while it is made ------------------------------------------------------------------------------

    def note(self, owner: Mapping[str, Any], name: str) -> None:
        self.reads.append(Read(owner, name, owner.get(name)))

    def norm_form(self, operation: Operation) -> NormForm:
        """Raises UntraceableError for a norm that has no native call."""
        (module,) = operation.modules
        own = vars(module)
        form: NormForm | None = None
        if isinstance(module, NativeNorm):
            example = torch.empty(1, operation.values["dim"], dtype=self.dtype, device=self.device)
            form = own[FUSED].form(module, example)
        weight = weight_of(module, operation.values["dim"], self.dtype)
        if form is None or not weight.is_contiguous():
            raise UntraceableError("a norm has no native call")
        if form.round_first and torch.promote_types(self.dtype, weight.dtype) is not self.dtype:
            raise UntraceableError("a norm changes the dtype")
        for name in ("eps", "variance_epsilon"):
            self.note(own, name)
        self.note(module._parameters, "weight")
        self.forms[id(operation)] = form
        return form

    def rotary_form(self, operation: Operation) -> RotaryForm:
        """Raises UntraceableError for a rotation that has no native call."""
        values, form = operation.values, None
        if self.table_dtype is not None:
            form = form_of_rotation(values["function"], self.dtype, self.table_dtype, self.device.type)
        if form is None or (values["partial"] and not leaves_rest(values["function"])):
            raise UntraceableError("its rotation has no native call")
        self.forms[id(operation)] = form
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

    def hooks(self) -> Iterator[Any]:
        """The hooks of the modules that are not called."""
        for each in self._hooks:
            yield from each.values()


class TracedLayer(Traced):
    """A traced decoder layer for calls over pages.

    max_tokens: the most tokens of a call. written: empty if it keeps no keys and values, nor what pages hold as such.
    state_sizes: None if it keeps no states of fixed size. attends_to_pages: whether it attends to what it keeps.
    leaves, taken: see AttentionRecord. keeps: that, and whether it keeps states. is_one_call: whether all linear
    layers are products of one native call, which can add something else to their results.
    """

    max_tokens: int
    is_one_call = False

    def __init__(
        self, trace: Trace, table_dtype: torch.dtype | None, attention: Attention, device: torch.device
    ) -> None:
        super().__init__(trace, table_dtype, attention, device)
        self.table_size = trace.table_size
        assert trace.layer_idx is not None
        self.layer_idx, self.written, self.sizes = trace.layer_idx, list[Tensor](), (0, 0, 0)
        self.leaves, self.taken = trace.leaves, trace.taken
        if self.taken is not None:
            self.sizes = self.taken[1:]
        if self.write is not None:
            kv = self.write.values
            # Empty K and V, with the shape and the dtype of those that are written.
            shapes = [(0, kv["heads"], kv[size]) for size in ("dim", "value_dim")]
            self.written = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]
            self.sizes = (kv["heads"], kv["dim"], kv["value_dim"])
        self.state_sizes: StateSizes | None = None
        if trace.stateful is not None:
            known, module = trace.stateful
            self.state_sizes = known.sizes(module)
        self.attends_to_pages = any(operation.kind == "attend" for operation in trace.operations)
        self.keeps = self.attends_to_pages, self.state_sizes is not None

    @property
    def limits(self) -> tuple[object, ...]:
        """The sizes that `takes` and `fits` compare, besides dtypes and the device."""
        shapes = (tensor.shape for tensor in self.written)
        return self.width, self.max_tokens, self.attention.window, self.state_sizes, self.leaves, self.taken, *shapes

    def takes(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, *, tokens: int) -> bool:
        """Return whether the tensors of a pass over so many tokens have the shapes that the trace is for."""
        if x.ndim != 3 or (tables is None) is not (self.table_dtype is None or self.own_tables is not None):
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
        size = self.written[0].shape[2] if self.table_size is None and self.written else self.table_size
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
        same = storage.dtype is self.dtype and storage.pages.k.device == self.device
        return same and storage.sizes == self.sizes

    def fits_source(self, storage: KVStorage, source: KVStorage) -> bool:
        """Return whether the pages of an encoder's output hold K and V as attention reads them: as the layer's other
        pages do, which fit.
        """
        pages, others = source.pages, storage.pages
        assert self.source is not None
        dims = (self.source.heads, self.source.dim, self.source.value_dim)
        kinds = [[None if each is None else each.dtype for each in held] for held in (pages, others)]
        same = source.dtype is self.dtype and pages.k.device == self.device and kinds[0] == kinds[1]
        return same and dims == (pages.k.shape[1], pages.key_dim, pages.value_dim)
