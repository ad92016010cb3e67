"""Stands in for tensors of a device on a CPU: it counts how often the host waits for their numbers."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accel.tensors

WAITING = {
    "tolist", "item", "cpu", "numpy", "nonzero", "unique", "masked_select", "equal", "__bool__", "__int__",
    "__float__", "__index__",
}  # fmt: skip
WAITS: Counter[str] = Counter()


class Remote(Tensor):
    """A tensor on a pretended device. What is computed from it is there too; reading its numbers is counted."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__"):
            keys = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(key, Tensor) and key.dtype is torch.bool for key in keys):
                WAITS["a mask as an index"] += 1
            elif any(isinstance(key, list | range) or type(key) is Tensor for key in keys):
                WAITS["an index from the host"] += 1  # torch copies it there and waits
        if name in WAITING or (name == "to" and "cpu" in map(str, args[1:])):
            WAITS[name] += 1
            if name == "tolist":
                return args[0].as_subclass(Tensor).tolist()
        return super().__torch_function__(func, types, args, kwargs or {})


class RemoteCopy:
    """A HostCopy that the host does not wait for, because it has waited for something later when it reads this."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.waits_before = tensor, WAITS.total()

    def tolist(self) -> Any:
        if WAITS.total() == self.waits_before:
            WAITS["a copy that nothing else waited for"] += 1
        return self.tensor.as_subclass(Tensor).tolist()


def remote_like(tensor: Tensor, like: Tensor) -> Tensor:
    """tensors.sent."""
    return tensor.as_subclass(Remote) if isinstance(like, Remote) else tensor


def install(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Treat Remote tensors as those of a device; returns the counts of waits, which are reset."""
    stand_ins = {"is_remote": lambda tensor: isinstance(tensor, Remote), "HostCopy": RemoteCopy, "sent": remote_like}
    real = {name: getattr(hf_accel.tensors, name) for name in stand_ins}
    for module in [module for name, module in sys.modules.items() if name.startswith("hf_accel.")]:
        for name, stand_in in stand_ins.items():
            if getattr(module, name, None) is real[name]:
                monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr("hf_accel.kernels.cpu.refusal", lambda: "the tensors are on a pretended device")
    WAITS.clear()
    return WAITS
