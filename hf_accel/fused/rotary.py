"""The rotary embedding of an attention module in one native call.

The original forward runs as it is, but for the name `apply_rotary_pos_emb`, which it finds in globals of its own: a
copy of its function with our rotation under that name. Neither the class nor its module is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..instance import Mixin, original_class
from ..kernels.cpu.library import FLOATS
from ..kernels.cpu.rope import rope
from ..tensors import is_plain as is_plain_tensor
from ..tensors import is_recorded
from .products import native

NAME = "apply_rotary_pos_emb"
Rotation = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RotaryForm:
    """interleaved: pairs of neighbours, else of the halves. round_each: both products are rounded."""

    interleaved: bool
    round_each: bool


def rotary_form(module: nn.Module, dtype: torch.dtype) -> RotaryForm | None:
    """How the module's forward rotates q and k, found by trying each form on random input; None if not at all."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
        return None
    original = forward.__globals__.get(NAME)
    return None if original is None else _form(original, dtype, dtype)


@lru_cache(maxsize=256)
def _form(original: Rotation, dtype: torch.dtype, table_dtype: torch.dtype) -> RotaryForm | None:
    if dtype not in FLOATS or table_dtype not in FLOATS:
        return None
    forms = (RotaryForm(interleaved, each) for interleaved, each in product((False, True), (True, False)))
    return next((form for form in forms if _agrees(original, form, dtype, table_dtype)), None)


@torch.no_grad()
def _agrees(original: Rotation, form: RotaryForm, dtype: torch.dtype, table_dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, angle = (torch.randn(2, *shape, generator=generator) for shape in ((6, 5, 16), (2, 5, 16), (5, 8)))
    q, k = q.to(dtype), k.to(dtype)
    angle = angle.repeat_interleave(2, dim=-1) if form.interleaved else torch.cat((angle, angle), dim=-1)
    cos, sin = (angle * 3).cos().to(table_dtype), (angle * 3).sin().to(table_dtype)
    try:
        expected = original(q, k, cos, sin)
        got = rope(q, k, cos, sin, interleaved=form.interleaved, round_each=form.round_each)
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    except Exception:  # another function of that name, with other arguments or results
        return False


@lru_cache(maxsize=256)
def _rewritten(original: type) -> Callable[..., Any]:
    """The class's forward with our rotation; where that does not apply, with the original one."""
    forward: Any = original.forward  # type: ignore[attr-defined]
    stock: Rotation = forward.__globals__[NAME]

    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _is_usual(*args):
            q, k, cos, sin = args
            # what rounds alike in one dtype need not in another, which a model can be given after it was patched
            form = _form(stock, q.dtype, cos.dtype)
            if form is not None:
                return rope(q, k, cos, sin, interleaved=form.interleaved, round_each=form.round_each)
        return stock(*args, **kwargs)

    ours = FunctionType(
        forward.__code__, forward.__globals__ | {NAME: rotate}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _is_usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether these are what the form was tried on: whole heads, and a row of the tables for each token."""
    if not (native(q) and all(is_plain_tensor(tensor) for tensor in (k, cos, sin))):
        return False
    if not (k.is_cpu and cos.is_cpu and sin.is_cpu and q.ndim == k.ndim == 4 and cos.ndim == 3):
        return False
    batch, _, tokens, size = q.shape
    return (
        q.dtype is k.dtype
        and cos.dtype is sin.dtype
        and k.shape[0] == batch
        and k.shape[2:] == q.shape[2:]
        and cos.shape == sin.shape
        and cos.shape[0] in (1, batch)
        and cos.shape[1:] == (tokens, size)
        and q.stride(-1) == k.stride(-1) == 1
        and q.numel() > 0
    )


class NativeRotary(Mixin):
    """Mixed into such an attention module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_recorded():  # a compiler could not follow into a function that was made here
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return _rewritten(original_class(self))(self, *args, **kwargs)
