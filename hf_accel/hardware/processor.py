"""The CPU: its instruction sets, cores and caches."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

import torch

from ..errors import UnsupportedError
from .container import ROOT, content_of, cpu_quotas

AVX512 = frozenset({"avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_vnni"})

# Best first. The features' names are those of torch.cpu.get_capabilities. The last level is for tests alone: it has
# the kernels of "amx", and plain loops in place of its tiles.
ISA_LEVELS: dict[str, frozenset[str]] = {
    "amx": AVX512 | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
    "avx512_vnni_bf16": AVX512 | {"avx512_bf16"},
    "avx512_vnni": AVX512,
    "avx_vnni": frozenset({"avx2", "fma3", "avx_vnni"}),
    "avx2": frozenset({"avx2", "fma3"}),
    "neon_i8mm": frozenset({"neon", "dot", "i8mm"}),
    "neon_dotprod": frozenset({"neon", "dot"}),
    "neon": frozenset({"neon"}),
    "portable": frozenset(),
    "avx2_tiles": frozenset({"avx2", "fma3"}),
}


def choose_isa(features: frozenset[str], *, requested: str | None = None) -> str:
    """Return the best level of ISA_LEVELS that `features` allow, or the `requested` one.

    Raises UnsupportedError for a level that is unknown, or that this CPU would stop at with an illegal instruction.
    """
    possible = [level for level, needed in ISA_LEVELS.items() if needed <= features]
    if not requested:
        return possible[0]
    if requested not in ISA_LEVELS:
        raise UnsupportedError(f"HF_ACCEL_ISA={requested!r} is not known; choose one of {', '.join(ISA_LEVELS)}")
    if requested not in possible:
        raise UnsupportedError(f"HF_ACCEL_ISA={requested!r} is not in this CPU; choose one of {', '.join(possible)}")
    return requested


# Linux's names of them on 64-bit ARM.
LINUX_NAMES = {"asimd": "neon", "asimddp": "dot", "i8mm": "i8mm"}


@lru_cache
def instruction_sets(root: Path = ROOT) -> frozenset[str]:
    """Return the CPU's features by torch's names.

    torch does not list them where it may not read /sys, as in some containers. Then these are the features that torch
    was built to use, or for ARM, NEON and those that Linux lists.
    """
    features = frozenset(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    if features:
        return features
    if platform.machine().lower() in ("aarch64", "arm64"):
        listed = set((content_of(root / "proc/cpuinfo") or "").split())
        return ISA_LEVELS["neon"] | {name for linux, name in LINUX_NAMES.items() if linux in listed}
    return ISA_LEVELS["avx2" if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else "portable"]


@lru_cache
def cpu_name() -> str:
    name = torch.cpu.get_capabilities().get("cpu_name")
    return str(name or platform.processor() or platform.machine() or "unknown CPU")


@lru_cache
def physical_cores() -> int:
    return int(torch.cpu.get_capabilities().get("num_physical_cores") or os.cpu_count() or 1)


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of logical cores that this process may keep busy, at least 1."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    available = len(affinity) or os.cpu_count() or 1
    # Rounded down: one thread more than the quota would be throttled, and the others wait for it.
    return max(1, min([available, *map(int, cpu_quotas(root))]))


@lru_cache
def cache_bytes(level: int, root: Path = ROOT) -> int | None:
    """Return the bytes of the level 2 cache of one core, or of the level 3 caches of all cores."""
    instances: dict[str, int] = {}
    for directory in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index*"):
        size = content_of(directory / "size") or ""
        if content_of(directory / "level") == str(level) and size.endswith("K"):
            instances[content_of(directory / "shared_cpu_list") or ""] = int(size[:-1]) * 1024
    if not instances:
        known_to_torch: int | None = torch.cpu.get_capabilities().get(f"l{level}_cache_size")
        return known_to_torch
    return max(instances.values()) if level == 2 else sum(instances.values())
