"""Who takes part: one file per library, each setup with the same small interface."""

from __future__ import annotations

from . import accel, bitsandbytes, llama_cpp, openvino, stock, torchao
from .base import Setup

SETUPS: tuple[Setup, ...] = (
    *stock.SETUPS,
    *accel.SETUPS,
    *llama_cpp.SETUPS,
    *openvino.SETUPS,
    *bitsandbytes.SETUPS,
    *torchao.SETUPS,
)

__all__ = ["SETUPS", "Setup"]
