"""The mask of causal attention: it tells our attention its meaning, and is stock's mask for all other code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map
from transformers.masking_utils import (
    _ignore_causal_mask_sdpa,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from ...tensors import is_recorded

aten: Any = torch.ops.aten
MASK_DIMENSIONS = 4


class Meaning(NamedTuple):
    """The meaning of a CausalMask: attention to the last `window` tokens, or to all, that are not padding.

    left_out: whether stock's sdpa makes no mask here, and follows is_causal instead. chunk: if given, a token attends
    to those of its chunk alone, of so many tokens; the first begins behind the padding on the left.
    """

    window: int | None
    padded: bool
    left_out: bool
    chunk: int | None = None


@dataclass
class Numbers:
    """The numbers of a mask, once they were made; a mask and what was detached from it share them.

    blind: whether a query sees nothing, once that was asked.
    """

    tensor: Tensor | None = None
    handed_out: bool = False
    blind: bool | None = None


class CausalMask(Tensor):
    """Stock's bool mask [B, 1, Q, T] of causal attention, whose numbers are made when somebody reads them.

    Our attention asks for its meaning and needs no numbers, so that memory stays linear in the length. Any function
    of torch gets the numbers, whoever calls it: a hook, a static cache, the model's own code. Copies (clone, detach,
    `to`, as gradient checkpointing and accelerate make them) keep the meaning. Once the numbers were handed out,
    somebody can have changed them: from then on the mask means what its numbers say.
    """

    columns: Tensor  # bool [B, T'], up to the column of the last query: which are no padding
    lengths: tuple[int, int]  # Q and T
    meaning: Meaning
    _numbers: Numbers

    @staticmethod
    def __new__(
        cls, columns: Tensor, lengths: tuple[int, int], meaning: Meaning, numbers: Numbers | None = None
    ) -> CausalMask:
        shape = (len(columns), 1, *lengths)
        wrapper: Any = Tensor._make_wrapper_subclass
        made: CausalMask = wrapper(cls, shape, dtype=torch.bool, device=columns.device)
        made.columns, made.lengths, made.meaning, made._numbers = columns, lengths, meaning, numbers or Numbers()
        return made

    @property
    def is_known(self) -> bool:
        """True if it still has its meaning; if not, only its numbers count."""
        return not self._numbers.handed_out

    @property
    def seen(self) -> int:
        """Return the number of columns that the last query may see; no query sees later ones."""
        return self.columns.shape[1]

    @property
    def has_blind_queries(self) -> bool:
        """True if a query sees nothing: padding on the left, or as much of it as a window has."""
        if self._numbers.blind is None:
            self._numbers.blind = self.meaning.padded and bool(self._blind().any())
        return self._numbers.blind

    def _blind(self) -> Tensor:
        """Bool [B, Q]. Without chunks."""
        counts = self.columns.cumsum(1)
        if self.meaning.window is not None:
            counts = counts - pad(counts, (self.meaning.window, 0))[:, : self.seen]
        return counts[:, self.seen - self.lengths[0] :] == 0

    def whole(self) -> Tensor:
        """The numbers, for our own code, which must not change them."""
        if self._numbers.tensor is None:
            # Made from `columns`, so that torch.compile sees where they come from.
            places = self.columns.new_ones(self.seen, dtype=torch.int64).cumsum(0)
            queries = places[self.seen - self.lengths[0] :, None]
            visible = places <= queries
            if self.meaning.window is not None:
                visible = visible & (places > queries - self.meaning.window)
            if self.meaning.chunk is not None:
                first = left_padding(self.columns)[:, None, None, None] + 1
                number = torch.div(places - first, self.meaning.chunk, rounding_mode="floor")
                visible = visible & (number == number[..., self.seen - self.lengths[0] :].transpose(-1, -2))
            self._numbers.tensor = pad(visible & self.columns[:, None, None, :], (0, self.lengths[1] - self.seen))
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
            if func is Tensor.__getitem__ and isinstance(args[0], CausalMask) and isinstance(args[1], tuple):
                if _takes_all(args[1], columns=args[0].lengths[1]):
                    return args[0]
                if args[0].is_known and all(isinstance(each, (int, slice)) for each in args[1]):
                    return args[0].whole()[args[1]].clone()  # an indexer reads it, and the mask stays as it is
            return func(*_with_numbers(args), **_with_numbers(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator that reaches a mask from C++, or that copies one."""
        kwargs = kwargs or {}
        mask = args[0] if args else None
        is_bool = kwargs.get("dtype") in (None, torch.bool)
        if func in _COPIES and is_bool and isinstance(mask, CausalMask) and mask.is_known:
            shared = mask._numbers if func in _VIEWS else None
            copy = CausalMask(func(mask.columns, *args[1:], **kwargs), mask.lengths, mask.meaning, shared)
            return return_and_correct_aliasing(func, args, kwargs, copy)
        return func(*_with_numbers(args), **_with_numbers(kwargs))

    # torch.compile takes a mask that was made outside of what it compiles by these two.
    def __tensor_flatten__(self) -> tuple[list[str], tuple[tuple[int, int], Meaning]]:
        return ["columns"], (self.lengths, self.meaning)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[tuple[int, int], Meaning], *_: Any
    ) -> CausalMask:
        return CausalMask(inner["columns"], *context)


_VIEWS = {aten.detach.default, aten.alias.default}
_COPIES = _VIEWS | {aten.clone.default, aten._to_copy.default}
_FACTS = ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout")
_NEED_NO_NUMBERS = {
    Tensor.clone, Tensor.detach, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.size, Tensor.dim, Tensor.numel,
    Tensor.contiguous, Tensor.is_contiguous, Tensor.is_floating_point,
    torch.clone, torch.detach, torch.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in _FACTS), vars(torch._C.TensorBase)["requires_grad"].__set__,
}  # fmt: skip


def _takes_all(index: Any, columns: int) -> bool:
    """Return whether an index takes all of a mask, as Gemma 4 does where the logits of all tokens are wanted, and
    Pix2Struct, which takes as many columns as there are keys.
    """
    cut = index[-1] if len(index) == MASK_DIMENSIONS else None
    if isinstance(cut, slice) and cut.start is cut.step is None and isinstance(cut.stop, int) and columns <= cut.stop:
        index = index[:-1]
    return all(each in (slice(None), slice(0, None)) for each in index)


def _with_numbers(values: Any) -> Any:
    return tree_map(lambda value: value._for_others() if isinstance(value, CausalMask) else value, values)


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return a CausalMask for causal attention, within a window, a chunk or neither; stock's 4-D mask for all else.

    It is never None where stock would make a mask: a module whose is_causal is False would lose it.
    """
    known, window, chunk = not is_recorded(), local_size, None
    if known and not _is_causal(mask_function, local_size):
        known = kv_offset == 0 and _is_chunked(mask_function, local_size, attention_mask)
        window, chunk = None, local_size
    seen = int(q_offset) + q_length - kv_offset if known else 0  # stock's static caches give q_offset as a tensor
    if not q_length <= seen <= kv_length:
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
    columns = None if attention_mask is None else _columns(attention_mask, kv_offset, kv_length)
    left_out = allow_is_causal_skip and _ignore_causal_mask_sdpa(
        columns, q_length, kv_length, int(q_offset), 0, local_size
    )
    padded = columns is not None and not bool(columns[:, :seen].all())
    if columns is not None and padded:
        columns = columns[:, :seen].clone()  # later changes of the mask by the user must not change this pass
    else:
        columns = torch.ones(1, 1, dtype=torch.bool, device=kwargs.get("device")).expand(batch_size, seen)
    return CausalMask(columns, (q_length, kv_length), Meaning(window, padded, left_out, chunk))


def _columns(attention_mask: Tensor, start: int, length: int) -> Tensor:
    """Return the columns of an attention mask from `start` on; missing ones count as padding, as in stock."""
    columns = attention_mask[:, start : start + length]
    return pad(columns, (0, length - columns.shape[1])) if columns.shape[1] < length else columns


def as_known(mask: Tensor | None) -> CausalMask | None:
    """Return the mask if it is a CausalMask that has its meaning, without chunks; None for any other."""
    return None if chunk_of(mask) is not None else as_understood(mask)


def as_understood(mask: Tensor | None) -> CausalMask | None:
    """Return the mask if it is a CausalMask that has its meaning, with chunks or without; None for any other."""
    return mask if isinstance(mask, CausalMask) and mask.is_known else None


def chunk_of(mask: Tensor | None) -> int | None:
    """Return the tokens of a chunk if a mask says no more than causal attention within chunks; None for any other."""
    known = as_understood(mask)
    return None if known is None else known.meaning.chunk


def left_padding(columns: Tensor) -> Tensor:
    """Return the number of columns before the first one that is no padding, of each row of columns [B, T]: [B]."""
    return (columns.cumsum(1) == 0).sum(1)


def numbers_of(mask: Tensor | None) -> Tensor | None:
    """Return the numbers of a CausalMask; any other mask is returned unchanged."""
    return mask.whole() if isinstance(mask, CausalMask) else mask


def window_of(mask: Tensor | None) -> tuple[bool, int | None]:
    """Return whether a mask says no more than causal attention within a window; and this window, None for all."""
    known = as_known(mask)
    return mask is None or known is not None, None if known is None else known.meaning.window


_WINDOWED: Any = sliding_window_causal_mask_function(1)


def _is_causal(mask_function: Any, local_size: int | None) -> bool:
    """Return whether it is transformers' own causal mask function, within a window of `local_size` if given."""
    if local_size is None:
        return mask_function is causal_mask_function
    if getattr(mask_function, "__code__", None) is not _WINDOWED.__code__:
        return False
    (window, causal), (own_window, _) = (f.__closure__[0].cell_contents for f in (mask_function, _WINDOWED))
    same = window.__code__ is own_window.__code__ and causal is causal_mask_function
    return bool(same and window.__closure__[0].cell_contents == local_size)


_CHUNKED: Any = chunked_causal_mask_function(1, torch.zeros(1, dtype=torch.int64, device="cpu"))


def _is_chunked(mask_function: Any, size: int | None, columns: Tensor | None) -> bool:
    """Return whether it is transformers' own mask function of causal attention within chunks of `size` tokens.

    The first chunk begins behind the padding. columns: bool [B, T], False for padding, or None.
    """
    if size is None or getattr(mask_function, "__code__", None) is not _CHUNKED.__code__:
        return False
    (chunk, causal), (own, _) = (f.__closure__[0].cell_contents for f in (mask_function, _CHUNKED))
    if chunk.__code__ is not own.__code__ or causal is not causal_mask_function:
        return False
    given, begins = (cell.cell_contents for cell in chunk.__closure__)
    expected = torch.zeros_like(begins) if columns is None else left_padding(columns)
    return bool(given == size and torch.equal(begins, expected.to(begins.dtype)))
