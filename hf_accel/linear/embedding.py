"""An embedding that looks its rows up in the quantized head of a tied model: one table in memory, not two."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from .formats import Layout, QuantizedWeight
from .layer import QuantLinear
from .writable import WritableWeight, plain


class QuantEmbedding(nn.Embedding):
    """Looks up rows of the weight [tokens, inputs] of `table`, a QuantLinear that has a scale for each output.

    An output of the head is a token of the embedding, so that the same bytes serve both. What is written to the
    weight, the head gets, as with stock's tied weights; a weight of other rows, which resize_token_embeddings() puts
    in, makes a float embedding of it again, while the head keeps its own. There is no Parameter, and no gradient.
    """

    def __init__(self, original: nn.Embedding, table: QuantLinear | None) -> None:
        """original: the float embedding that it replaces. table: None until a checkpoint is loaded."""
        nn.Module.__init__(self)
        for name in ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type"):
            setattr(self, name, getattr(original, name))
        self.scale_grad_by_freq, self.sparse = original.scale_grad_by_freq, original.sparse
        self.float_class = type(original)
        self.scalar_embed_scale = number_after(original)
        self.share(table)
        self._lent: weakref.ref[WritableWeight] | None = None

    def share(self, table: QuantLinear | None) -> None:
        """Look up in `table` from now on. It is the model's head, and no child of this module as well."""
        vars(self)["table"] = table
        if table is not None:
            table.finds_rows = True  # of another backend, if it is packed again

    @property
    def head(self) -> QuantLinear:
        """The layer whose weight this is."""
        return cast(QuantLinear, vars(self)["table"])

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

    def as_float(self) -> nn.Embedding:
        """Return a float embedding of the same numbers."""
        made = type(self)(self, self.head)
        made.float_class = self.float_class
        become_float(made, self.quantized.dequantize(self.compute_dtype))
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lent": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows of the INT8 head"


def is_table(layout: Layout) -> bool:
    """Return whether rows of such a weight can be looked up: INT8 with a scale for each output."""
    return layout.label == "int8" and layout.group_size is None and not layout.minima


def become_float(embedding: QuantEmbedding, weight: Tensor) -> None:
    """Make an embedding of the original's class of it, with a weight of its own."""
    scale = embedding.scalar_embed_scale
    for name in ("table", "_lent", "float_class"):
        kept = vars(embedding).pop(name)
        if name == "float_class":
            embedding.__class__ = kept
    embedding.num_embeddings = len(weight)
    embedding.register_parameter("weight", nn.Parameter(weight.detach().clone()))
    if scale is not None:
        embedding.register_buffer("embed_scale", torch.tensor(scale).to(weight), persistent=False)


def number_after(embedding: nn.Embedding) -> float | None:
    """Return what transformers' scaled embeddings multiply by; None for a plain one."""
    return None if type(embedding) is nn.Embedding else getattr(embedding, "scalar_embed_scale", None)
