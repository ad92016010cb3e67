"""On which device a backend is tried, and how to try one without the native kernels, which come first on a CPU."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from hf_accel.attention.hf import forward
from hf_accel.hardware import ISA_LEVELS
from hf_accel.kernels import cpu, triton
from hf_accel.kernels.cpu import library
from hf_accel.linear import layer, nf4
from hf_accel.linear.backends.registry import choose
from hf_accel.patching import weight_sites

# Of results, relative to their size: Hopper's tensor cores add up products of FP8 with about 13 bits.
FP8_ON_A_GPU = 2.0**-10


def triton_device() -> str:
    """Where Triton kernels are tried: on the CPU in Triton's interpreter, and where there is no GPU, that refuses."""
    return "cuda" if torch.cuda.is_available() and not triton.is_interpreted() else "cpu"


def device_of(backend: object) -> str:
    """Where a backend of a registry is tried. It says by its name where it runs."""
    name = getattr(backend, "name", "")
    if name == "triton":
        return triton_device()
    return "cuda" if name in ("flash_attn", "varlen") or getattr(backend, "device_type", None) == "cuda" else "cpu"


def multiply_pairs(monkeypatch: pytest.MonkeyPatch, *, does: bool) -> None:
    """Have the level in use be one that multiplies pairs of bfloat16, or not. Kernels take bfloat16 on all."""
    level = replace(library.level_in_use(), pairs_of_bfloat16=does)
    monkeypatch.setitem(ISA_LEVELS, library.isa(), level)


def without_native_kernels(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """On a CPU they would be chosen first. What was chosen before is not remembered meanwhile."""
    monkeypatch.setattr(cpu, "refusal", lambda: why)
    for module in (weight_sites, layer):
        monkeypatch.setattr(module, "choose", choose.__wrapped__)
    monkeypatch.setattr(forward, "_choose", forward._choose.__wrapped__)


def without_fused_nf4(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AVX-512 BF16, bitsandbytes' fused kernel rounds what it packs, and takes no small layers."""
    monkeypatch.setattr(nf4, "has_fused_kernel", lambda: False)
    monkeypatch.setattr(import_module("bitsandbytes.nn.modules"), "has_avx512bf16", lambda: False)
