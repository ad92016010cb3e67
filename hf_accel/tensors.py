"""Facts about a tensor, and what torch does with it now, for code that reads its memory without torch."""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling

OF_ALLOCATOR = ("allocate memory", "you tried to allocate")  # in the errors of torch's allocator on a CPU
P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # types whose numbers are where data_ptr() says, in their dtype


def is_plain_tensor(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Return the tensor, or those that a subclass without memory of its own is made of (torchao's, DTensor)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # newer DTensors name their mesh too
            yield from plain_tensors(part)


def is_sharded(tensor: object) -> bool:
    """Return whether this is a DTensor, of which each process holds a part."""
    return hasattr(tensor, "device_mesh")


def local_tensor(tensor: Any) -> Tensor:
    """Return the part of a DTensor that this process holds, without a gradient; any other tensor unchanged."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def integers(numbers: Sequence[int], *, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor [len(numbers)] of int64 or int32 on the host; for many numbers much faster than torch.tensor."""
    if not numbers:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(array("q" if dtype is torch.int64 else "i", numbers), dtype=dtype)


def sent(tensor: Tensor, like: Tensor) -> Tensor:
    """Copy a tensor of the host to the device of another tensor; the host does not wait for the copy."""
    if like.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(like.device, non_blocking=True)


def is_remote(tensor: Tensor) -> bool:
    """Return whether the host must wait for a device to read a number of the tensor."""
    return tensor.device.type != "cpu"


def model_device(model: nn.Module) -> torch.device:
    """The device on which the model computes.

    With accelerate's offloading, its weights are on the meta device between calls; a hook then knows the device.
    """
    device: Any = model.device
    if device.type != "meta":
        return torch.device(device)
    hooks = (vars(module).get("_hf_hook") for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    found: Any = next((device for device in devices if device is not None), device)
    return torch.device(found)


class HostCopy:
    """Numbers that are on their way to the host. The copy starts at once, and only tolist() waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._event = tensor, None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tolist(self) -> Any:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory; that of torch on a CPU has no class of its own."""
    of_allocator = isinstance(error, RuntimeError) and any(text in str(error) for text in OF_ALLOCATOR)
    return of_allocator or isinstance(error, MemoryError | torch.OutOfMemoryError)


def is_recorded() -> bool:
    """Return whether torch records or transforms the operators that run now; it would not see a native call.

    torch.compile, export, jit.trace, make_fx, fake tensors, FLOP counters; vmap, grad and jvp.
    """
    return is_compiling() or _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active() or _is_tracing()


def is_transformed() -> bool:
    """Return whether a transform of torch.func, or forward-mode differentiation, is at work."""
    return not is_compiling() and (_are_functorch_transforms_active() or forward_ad._current_level >= 0)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of torch's products with x, and of attention: that of autocast where it is on, or x's own."""
    if not _is_any_autocast_enabled() or x.dtype is torch.float64:
        return x.dtype
    return autocast_dtype(x.device.type) or x.dtype


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of torch.autocast on a kind of device; None where it is off, and on meta, which it does not
    know.
    """
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def has_instructions(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of this dtype by more than one number at a time on this CPU."""
    support = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in support:
        return True
    has_onednn: bool = torch.backends.mkldnn.is_available()
    return has_onednn and bool(getattr(torch.ops.mkldnn, support[dtype])())


def default_is_host() -> bool:
    """Return whether tensors are made on the host where no device is named; cheap where nobody has changed that."""
    return not _len_torch_function_stack() or torch.get_default_device().type == "cpu"


@contextmanager
def made_on_host() -> Iterator[None]:
    """Leave a default device that a user has set, as `with torch.device("meta")` does: our own tensors are small."""
    if default_is_host():
        yield
        return
    with torch.device("cpu"):
        yield


def on_host(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs on the host: its own tensors are made there, and a compiler does not follow it.

    torch.compile(model.generate) would follow a whole loop for minutes, with its scheduler and block tables.
    """
    reason = "it runs on the host; compile the model's forward"
    return cast("Callable[P, T]", torch.compiler.disable(made_on_host()(function), reason=reason))


@contextmanager
def torchs_defaults() -> Iterator[None]:
    """Leave the default dtype and device that a user, or transformers, has set to make a model: we compute here."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with made_on_host():
            yield
    finally:
        torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class Unread(Generic[T]):
    """A result that is known when its numbers are.

    numbers: [n] int64, on any device. finish: makes the result of the list of these numbers.
    """

    numbers: Tensor
    finish: Callable[[list[int]], T]

    def then(self, function: Callable[[T], U]) -> Unread[U]:
        """Apply `function` to the result."""
        return Unread(self.numbers, lambda numbers: function(self.finish(numbers)))

    def read(self, meanwhile: Callable[[Tensor], None] | None = None) -> T:
        """The result. The host waits for the device. meanwhile: called with the numbers while they are copied."""
        if meanwhile is None:
            return self.finish(self.numbers.tolist())
        copy = HostCopy(self.numbers)
        meanwhile(self.numbers)
        return self.finish(copy.tolist())


def known(result: T) -> Unread[T]:
    """A result that needs no number of a device."""
    return Unread(torch.empty(0, dtype=torch.int64), lambda _: result)


def all_unread(results: abc.Sequence[Unread[T]]) -> Unread[list[T]]:
    """The results of many as one, whose numbers are read at once."""
    if len(results) == 1:
        return results[0].then(lambda result: [result])
    counts = [len(result.numbers) for result in results]
    used = [result.numbers for result in results if len(result.numbers)]
    numbers = torch.cat(used) if used else torch.empty(0, dtype=torch.int64)

    def finish(read: list[int]) -> list[T]:
        found, start = [], 0
        for result, count in zip(results, counts, strict=True):
            found.append(result.finish(read[start : start + count]))
            start += count
        return found

    return Unread(numbers, finish)


# -- one copy to a device for many tensors --------------------------------------------------------------

ALIGNMENT = 16  # bytes; Triton makes better code for pointers that are multiples of it


def packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of tensors of the host, one after the other, as uint8, in memory that `device` can copy from by
    itself.
    """
    starts = _starts(tensors)
    # torch reuses pinned memory only when the copies from it are done.
    buffer = torch.zeros(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    numbers = buffer.numpy()  # whose slices cost a fraction of a tensor's
    for start, tensor in zip(starts, tensors, strict=False):
        numbers[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return buffer


def views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose bytes `packed` put into a buffer. like: tensors of their shapes and dtypes."""
    starts = _starts(like)
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=False)
    ]


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    return [0, *accumulate(sizes)]
