"""How fast torch multiplies int8 matrices on this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from hf_accel.hardware.device import matmul_peak


def integer_peak(device: str) -> float | None:
    """Operations per second of torch's fastest int8 matmul, None where it has none; measured once per thread count."""
    return _integer_peak(device, torch.get_num_threads())


@lru_cache
def _integer_peak(device: str, threads: int) -> float | None:
    for build in (onednn_matmul, int_matmul):
        try:
            return matmul_peak(partial(build, device=device), device)
        except (AttributeError, NotImplementedError, RuntimeError):  # the operator is missing in this build
            continue
    return None


def onednn_matmul(size: int, *, device: str) -> Callable[[], Tensor]:
    if device != "cpu":
        raise NotImplementedError("oneDNN runs on the CPU")
    inputs = torch.ones(size, size, dtype=torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(torch.ones(size, size, dtype=torch.int8), None)
    scales, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int64)
    return lambda: torch.ops.onednn.qlinear_pointwise(
        inputs, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


def int_matmul(size: int, *, device: str) -> Callable[[], Tensor]:
    matrix = torch.ones(size, size, dtype=torch.int8, device=device)
    return lambda: torch._int_mm(matrix, matrix)
