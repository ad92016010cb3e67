"""Who takes part: one file per library, each setup with the same small interface."""

from __future__ import annotations

from . import accel, bitsandbytes, llama_cpp, stock, torchao
from .base import Setup

SETUPS: tuple[Setup, ...] = (
    *stock.SETUPS,
    *accel.SETUPS,
    *llama_cpp.SETUPS,
    *bitsandbytes.SETUPS,
    *torchao.SETUPS,
)

__all__ = ["SETUPS", "Setup"]
