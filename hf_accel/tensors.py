"""Tensors of other libraries, which may be made of several."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # types whose numbers are where data_ptr() says, in their dtype


def is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a subclass (torchao's) is made of, which has no memory of its own."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from plain_tensors(getattr(tensor, name))
