"""The mask of causal attention: it says what it means to our attention, and is stock's mask to everybody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from ...tensors import is_recorded

aten: Any = torch.ops.aten


class Meaning(NamedTuple):
    """What a CausalMask stands for: attention to the last `window` tokens, or to all, that are not padding.

    left_out: stock's sdpa makes no mask here, and goes by is_causal instead.
    """

    window: int | None
    padded: bool
    left_out: bool


@dataclass
class Numbers:
    """The numbers of a mask, once they were made; a mask and what was detached from it share them."""

    tensor: Tensor | None = None
    handed_out: bool = False


class CausalMask(Tensor):
    """Stock's bool mask [B, 1, Q, T] of causal attention, whose numbers are made when somebody reads them.

    Our attention asks for its meaning and needs no numbers, so that memory stays linear in the length. Any function
    of torch gets the numbers, whoever calls it: a hook, a static cache, the model's own code. Copies (clone, detach,
    `to`, as gradient checkpointing and accelerate make them) keep the meaning. Once the numbers were handed out,
    somebody can have changed them: from then on the mask means what its numbers say.
    """

    columns: Tensor  # bool [B, T]: which columns are no padding
    meaning: Meaning
    _numbers: Numbers

    @staticmethod
    def __new__(cls, columns: Tensor, q_length: int, meaning: Meaning, numbers: Numbers | None = None) -> CausalMask:
        rows, kv_length = columns.shape
        shape = (rows, 1, q_length, kv_length)
        wrapper: Any = Tensor._make_wrapper_subclass
        made: CausalMask = wrapper(cls, shape, dtype=torch.bool, device=columns.device)
        made.columns, made.meaning, made._numbers = columns, meaning, numbers or Numbers()
        return made

    @property
    def means(self) -> Meaning | None:
        """What it stands for; None where only its numbers say it."""
        return None if self._numbers.handed_out else self.meaning

    def whole(self) -> Tensor:
        """The numbers, for our own code, which does not change them."""
        if self._numbers.tensor is None:
            # Made from `columns`, so that torch.compile sees where they come from.
            places = self.columns.new_ones(self.columns.shape[1], dtype=torch.int64).cumsum(0)
            queries = places[places.shape[0] - self.size(2) :, None]
            visible = places <= queries
            if self.meaning.window is not None:
                visible = visible & (places > queries - self.meaning.window)
            self._numbers.tensor = visible & self.columns[:, None, None, :]
        return self._numbers.tensor

    def _for_others(self) -> Tensor:
        self._numbers.handed_out = True
        return self.whole()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NEED_NO_NUMBERS:
                return func(*args, **kwargs)
            return func(*_with_numbers(args), **_with_numbers(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator that reaches a mask from C++, or that copies one."""
        kwargs = kwargs or {}
        mask = args[0] if args else None
        is_bool = kwargs.get("dtype") in (None, torch.bool)
        if func in _COPIES and is_bool and isinstance(mask, CausalMask) and mask.means is not None:
            shared = mask._numbers if func in _VIEWS else None
            copy = CausalMask(func(mask.columns, *args[1:], **kwargs), mask.size(2), mask.meaning, shared)
            return return_and_correct_aliasing(func, args, kwargs, copy)
        return func(*_with_numbers(args), **_with_numbers(kwargs))

    # torch.compile takes a mask that was made outside of what it compiles by these two.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, Meaning]]:
        return ["columns"], (self.size(2), self.meaning)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: tuple[int, Meaning], *_: Any) -> CausalMask:
        return CausalMask(inner["columns"], *context)


_VIEWS = {aten.detach.default, aten.alias.default}
_COPIES = _VIEWS | {aten.clone.default, aten._to_copy.default}
_FACTS = ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout")
_NEED_NO_NUMBERS = {
    Tensor.clone, Tensor.detach, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.size, Tensor.dim, Tensor.numel,
    Tensor.is_floating_point, torch.clone, torch.detach, torch.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in _FACTS), vars(torch._C.TensorBase)["requires_grad"].__set__,
}  # fmt: skip


def _with_numbers(values: Any) -> Any:
    return tree_map(lambda value: value._for_others() if isinstance(value, CausalMask) else value, values)


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return a CausalMask for causal attention, within a window or not; stock's 4-D mask for all else.

    It is never None where stock would make a mask: a module whose is_causal is False would lose it.
    """
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    covered = attention_mask is None or attention_mask.shape[1] >= kv_offset + kv_length
    known = aligned and covered and allow_is_causal_skip and _is_causal(mask_function, local_size)
    if not known or is_recorded():
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            config=config,
            **kwargs,
        )
    columns = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
    padded = columns is not None and not bool(columns.all())
    if columns is not None and padded:
        columns = columns.clone()  # what the user does to the mask later must not change this pass
    else:
        columns = torch.ones(1, 1, dtype=torch.bool, device=kwargs.get("device")).expand(batch_size, kv_length)
    whole = q_length in (1, kv_length) and (local_size is None or kv_length < local_size)
    return CausalMask(columns, q_length, Meaning(local_size, padded, left_out=whole and not padded))


def window_of(mask: Tensor | None) -> tuple[bool, int | None]:
    """Whether a mask says no more than causal attention within a window; and this window, None for all tokens."""
    if mask is None:
        return True, None
    means = mask.means if isinstance(mask, CausalMask) else None
    return means is not None, None if means is None else means.window


_WINDOWED: Any = sliding_window_causal_mask_function(1)


def _is_causal(mask_function: Any, local_size: int | None) -> bool:
    """Whether it is transformers' own function for causal attention, within a window of `local_size` if given."""
    if local_size is None:
        return mask_function is causal_mask_function
    if getattr(mask_function, "__code__", None) is not _WINDOWED.__code__:
        return False
    (window, causal), (own_window, _) = (f.__closure__[0].cell_contents for f in (mask_function, _WINDOWED))
    same = window.__code__ is own_window.__code__ and causal is causal_mask_function
    return bool(same and window.__closure__[0].cell_contents == local_size)
