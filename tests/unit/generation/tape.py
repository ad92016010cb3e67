"""Stands in for CUDA graphs on a CPU: torch's operators on a tape, with the tensors and numbers of the capture.

A replay runs the same operators, and launches of Triton kernels, on the same memory. So what Python decided at the
capture is frozen, a tensor that was put in the place of another one is not seen, and an operator for which the host
would wait is refused, as on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

import hf_accel.attention
from hf_accel.attention import AttentionBackend, AttentionSpec
from hf_accel.attention.masking import visible
from hf_accel.attention.reference import ReferenceBackend
from hf_accel.attention.sdpa import gather
from hf_accel.generation.hf import graphed_runner
from hf_accel.kernels.layouts import KV, AttentionOptions, Ragged
from hf_accel.kernels.triton.launch import Launch

from ...devices import without_native_kernels

# The host waits for the result of these, or their shape depends on numbers; or they take numbers from the host.
WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "repeat_interleave.Tensor", "lift_fresh", "bincount",
}  # fmt: skip


class SyncError(RuntimeError):
    pass


class Watch(TorchDispatchMode):
    """Counts the operators for which the host waits. refuses: whether they raise instead."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.refuses = refuses
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype is torch.bool for x in tree_flatten(args[1:2])[0]
        )
        if by_mask or name in WAITING or f"{name}.{func._overloadname}" in WAITING:
            self.waits[name] += 1
            if self.refuses:
                raise SyncError(f"the host waits for {func}")
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Recording(Watch):
    def __init__(self) -> None:
        super().__init__(refuses=True)
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def launch(self, run: Callable[[Launch], None], launch: Launch) -> None:
        with _disable_current_modes():  # Triton's interpreter uses torch, which a GPU does not
            run(launch)
        self.calls.append((run, (launch,), {}, None))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        # An alias, because `parameter.data = ...` must not be seen by the tape.
        self.calls.append((func, *tree_map_only(Tensor, Tensor.detach, (args, kwargs, out))))
        return out


class Tape:
    nbytes = 1000

    def __init__(self, calls: list[Any], maker: TapeMaker) -> None:
        self.calls, self.maker = calls, maker

    def replay(self) -> None:
        self.maker.events.append("replay")
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class TapeMaker:
    """events: what was done, in order. free: what free_bytes() says. fails: what the next capture raises."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.free = 2**40
        self.fails: Exception | None = None

    def capture(self, function: Callable[[], object]) -> Tape:
        function()
        run = Launch.run
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.events.append("capture")
        # transformers asks this, and then reads no numbers on the host.
        capturing = patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
        recording = Recording()
        launching = patch.object(Launch, "run", lambda launch: recording.launch(run, launch))
        with capturing, launching, recording:
            function()
        return Tape(recording.calls, self)

    def total_bytes(self) -> int:
        return 2 * self.free

    def free_bytes(self) -> int:
        return self.free


class TapeBackend(ReferenceBackend):
    """Paged attention by torch's operators that reads no length on the host."""

    name = "tape"
    capturable = True

    def refuses(self, spec: AttentionSpec) -> str | None:
        return None

    def paged(self, q: Tensor, kv: KV, ragged: Ragged, options: AttentionOptions, *, return_lse: bool = False) -> Any:
        assert ragged.block_table is not None and not return_lse
        k, v, *_ = gather(kv, ragged.block_table, q.dtype)  # [B, Hkv, T, D]
        starts, ends = ragged.cu_q[:-1].long(), ragged.cu_q[1:].long()
        tokens = torch.arange(len(q), device=q.device)
        owner = torch.searchsorted(ends, tokens, right=True)
        positions = tokens - starts[owner] + ragged.kv_len[owner] - (ends - starts)[owner]
        columns = torch.arange(k.shape[2], device=q.device)
        seen = visible(positions[:, None], columns, causal=True, window=options.window)[:, 0]
        seen = seen & (columns < ragged.kv_len[owner][:, None])
        group = q.shape[1] // k.shape[1]
        keys, values = (x[owner].repeat_interleave(group, 1).float() for x in (k, v))  # [N, Hq, T, D]
        scores = (keys @ q.float()[..., None])[..., 0] * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        weights = torch.where(seen[:, None], weights, 0.0)
        values = torch.where(seen[:, None, :, None], values, 0.0)  # slots that were never written may hold NaN
        return (weights[:, :, None] @ values)[:, :, 0].to(q.dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> list[TapeMaker]:
    """Give every session tapes for graphs; returns the makers, which sessions add to."""
    makers: list[TapeMaker] = []

    def make(device: torch.device) -> TapeMaker:
        makers.append(TapeMaker())
        return makers[-1]

    without_native_kernels(monkeypatch, "a tape holds torch's operators alone")
    monkeypatch.setattr("hf_accel.tensors._len_torch_dispatch_stack", lambda: 0)
    backends: tuple[AttentionBackend, ...] = (TapeBackend(), *hf_accel.attention.BACKENDS)
    monkeypatch.setattr(hf_accel.attention, "BACKENDS", backends)
    monkeypatch.setattr(graphed_runner, "make_graphs", make)
    monkeypatch.setattr("hf_accel.generation.graphs.DEVICES", ("cpu",))
    return makers
