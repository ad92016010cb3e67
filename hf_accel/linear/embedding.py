"""An embedding that looks its rows up in a quantized weight: in the head of a tied model, or in a table of its own."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from .backends.backend import LinearSpec
from .backends.registry import BackendChoice, choose
from .formats import Layout, QuantizedWeight, zeros
from .layer import QuantLinear, QuantModule
from .replacement import Replacement
from .writable import WritableWeight, plain

TABLE = "table"  # the attribute of an embedding that is its weight; a child, if nobody shares it
ROW_BACKEND = "reference"  # the backend of a table that nothing multiplies by: its rows lie one after the other


class QuantTable(QuantModule):
    """The weight [tokens, numbers] of an embedding that shares it with nobody. Only its rows are read."""

    bias = None
    plural = "embedding"
    multiplies = False

    @classmethod
    def from_packed(cls, packed: Any, *, choice: BackendChoice) -> Self:
        """Over what `choice.backend.quantize` made of a weight of `choice.spec`."""
        table = cls.__new__(cls)
        table._describe(choice.spec, ROW_BACKEND)
        table.choice, table._packed, table.finds_rows = choice, packed, True
        return table

    @classmethod
    def empty(cls, spec: LinearSpec) -> Self:
        """Zeros, to load a checkpoint into."""
        weight = zeros(spec.layout, (spec.out_features, spec.in_features), dtype=spec.dtype, device=spec.device_type)
        return cls.from_packed(weight, choice=choose(spec, ROW_BACKEND, finds_rows=True)).unpack()


class QuantEmbedding(Replacement, nn.Embedding):
    """Looks up rows of the weight [tokens, inputs] of `table`: the QuantLinear that is the head, or a QuantTable.

    An output of the head is a token of the embedding, so that the same bytes serve both. What is written to the
    weight, the head gets, as with stock's tied weights; a weight of other rows, which resize_token_embeddings() puts
    in, makes a float embedding of it again, while the head keeps its own. There is no Parameter, and no gradient; a
    copy of this module alone, as PEFT's modules_to_save makes one to be trained, is a float embedding.
    """

    float_class: type[nn.Embedding]  # the class of the original

    def __init__(self, original: nn.Embedding, table: QuantLinear | QuantTable) -> None:
        """original: the float embedding that it replaces."""
        nn.Module.__init__(self)
        for name in ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type"):
            setattr(self, name, getattr(original, name))
        self.scale_grad_by_freq, self.sparse = original.scale_grad_by_freq, original.sparse
        self.float_class = original.float_class if isinstance(original, QuantEmbedding) else type(original)
        self.scalar_embed_scale = number_after(original)
        if isinstance(table, QuantTable):
            self.table = table
        else:  # it is the model's head, and no child of this module as well
            vars(self)[TABLE] = table
        table.finds_rows = True  # of another backend, if it is packed again
        self._lent: weakref.ref[WritableWeight] | None = None

    @property
    def is_shared(self) -> bool:
        """True if the weight is the head's."""
        return isinstance(self.head, QuantLinear)

    @property
    def head(self) -> QuantLinear | QuantTable:
        """The layer whose weight this is."""
        found: QuantLinear | QuantTable = self.table
        return found

    @property
    def embed_scale(self) -> Tensor:
        """The number that rows are multiplied by, which PEFT reads; a plain embedding has none."""
        if self.scalar_embed_scale is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'embed_scale'")
        return torch.tensor(self.scalar_embed_scale, device="cpu")

    def forward(self, input: Tensor) -> Tensor:
        head = self.head
        head.settle()
        if self._lent is not None and (held := self._lent()) is not None:
            held.settle()
        choice = head.choice or head.pack().chosen
        rows = choice.backend.rows(head._packed, input.reshape(-1), head.dtype)
        if head._input_order is not None:
            rows = rows[:, head._input_order.argsort()]
        out = rows.view(*input.shape, self.embedding_dim)
        return out if self.scalar_embed_scale is None else out * torch.tensor(self.scalar_embed_scale).to(out)

    # -- the weight, as in QuantLinear --------------------------------------------------------------------

    @property
    def quantized(self) -> QuantizedWeight:
        return self.head.quantized

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.head.compute_dtype

    @property
    def writes(self) -> int:
        return self.head.writes

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [tokens, inputs]: a copy, but writes to it go to `write`."""
        held = None if self._lent is None else self._lent()
        if held is None or not held.is_weight_of(self):
            held = WritableWeight.of(self)
            self._lent = weakref.ref(held)
        return held

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight" or not isinstance(value, Tensor):
            super().__setattr__(name, value)
        elif not (isinstance(value, WritableWeight) and value.is_weight_of(self)):
            self.write(plain(value))

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """Give the head another weight; one of another number of rows is kept here, in floating point."""
        if value.dim() != 2 or value.shape[1] != self.embedding_dim:
            raise UnsupportedError(
                f"a weight {list(value.shape)} cannot be written to an embedding of {self.embedding_dim} numbers"
            )
        if len(value) == self.num_embeddings:
            self.head.write(value)
        else:
            become_float(self, value)

    def original(self, *, device: str | None = None) -> nn.Embedding:
        made = type(self)(self, self.head)
        shape = (self.num_embeddings, self.embedding_dim)
        on_meta = None if device is None else torch.empty(shape, dtype=self.compute_dtype, device=device)
        become_float(made, self.quantized.dequantize(self.compute_dtype) if on_meta is None else on_meta)
        return made.train(self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Embedding:
        if not memo:
            return self.original()
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lent": None}

    def extra_repr(self) -> str:
        label = self.head.layout.label.upper()
        return f"{super().extra_repr()}, rows of {f'the {label} head' if self.is_shared else label}"


def is_table(layout: Layout) -> bool:
    """Return whether rows of such a weight are looked up where they lie."""
    return layout.label in ("int8", "int4")


def become_float(embedding: QuantEmbedding, weight: Tensor) -> None:
    """Make an embedding of the original's class of it, with a weight of its own."""
    scale = embedding.scalar_embed_scale
    kind: Any = embedding.float_class
    embedding._modules.pop(TABLE, None)
    for name in (TABLE, "_lent", "float_class"):
        vars(embedding).pop(name, None)
    embedding.__class__ = kind
    embedding.num_embeddings = len(weight)
    embedding.register_parameter("weight", nn.Parameter(weight.detach().clone()))
    if scale is not None:
        embedding.register_buffer("embed_scale", torch.tensor(scale).to(weight), persistent=False)


def number_after(embedding: nn.Embedding) -> float | None:
    """Return what transformers' scaled embeddings multiply by; None for a plain one."""
    return None if type(embedding) is nn.Embedding else getattr(embedding, "scalar_embed_scale", None)
