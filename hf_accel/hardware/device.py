"""A device and its host: cores, instruction sets, caches, memory and its pages, speeds.

A container's limits count, which it sets through control groups, version 1 and 2 (man 7 cgroups). Speeds are those of
torch with its current threads; each is measured at the first question, once.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ..errors import UnsupportedError
from .isa_levels import ISA_LEVELS, SLOW_PAIRS, choose_isa
from .large_pages import in_large_pages

ROOT = Path("/")
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device and its host; sizes in bytes.

    name, total_memory, free_memory: of the device; compute_capability: of a CUDA device.
    usable_cores: the host's logical cores that affinity and the container's quota allow.
    threads: torch's setting when this was made.
    isa: the level of ISA_LEVELS that kernels shall use; instruction_sets: all that the CPU has.
    l2_bytes: of one core; l3_bytes: of all of them together.
    """

    device: str
    name: str
    physical_cores: int
    usable_cores: int
    threads: int
    isa: str
    instruction_sets: tuple[str, ...]
    l2_bytes: int | None
    l3_bytes: int | None
    total_memory: int | None
    free_memory: int | None
    compute_capability: tuple[int, int] | None


def detect(device: torch.device | str = "cpu") -> Hardware:
    """Describe `device`, "cpu" or "cuda[:index]". Free memory, threads and HF_ACCEL_ISA are read again at each call.

    Raises UnsupportedError for another kind of device, for CUDA where there is none, and for a bad HF_ACCEL_ISA.
    """
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device={device!r} is not one that torch knows; use 'cpu' or 'cuda'") from error
    if target.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={str(target)!r} cannot be described; use 'cpu' or 'cuda'")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"device={str(target)!r}: torch sees no CUDA device here; use 'cpu'")
    on_gpu = target.type == "cuda"
    features = instruction_sets()
    total, free = gpu_memory(target) if on_gpu else host_memory()
    return Hardware(
        device=str(target),
        name=torch.cuda.get_device_name(target) if on_gpu else cpu_name(),
        physical_cores=physical_cores(),
        usable_cores=usable_cores(),
        threads=torch.get_num_threads(),
        isa=choose_isa(features, requested=os.environ.get("HF_ACCEL_ISA")),
        instruction_sets=tuple(sorted(features)),
        l2_bytes=cache_bytes(2),
        l3_bytes=cache_bytes(3),
        total_memory=total,
        free_memory=free,
        compute_capability=torch.cuda.get_device_capability(target) if on_gpu else None,
    )


# -- the CPU -----------------------------------------------------------------------------------------

# Linux's names of them on 64-bit ARM.
LINUX_NAMES = {"asimd": "neon", "asimddp": "dot", "i8mm": "i8mm"}


@lru_cache
def instruction_sets(root: Path = ROOT) -> frozenset[str]:
    """Return the CPU's features by torch's names, and SLOW_PAIRS.

    torch does not list them where it may not read /sys, as in some containers. Then these are the features that torch
    was built to use, or for ARM, NEON and those that Linux lists.
    """
    features = frozenset(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    if features:
        return features | {SLOW_PAIRS} if has_slow_pairs(features) else features
    if platform.machine().lower() in ("aarch64", "arm64"):
        listed = set((content_of(root / "proc/cpuinfo") or "").split())
        return ISA_LEVELS["neon"].needs | {name for linux, name in LINUX_NAMES.items() if linux in listed}
    has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return ISA_LEVELS["avx2" if has_avx2 else "portable"].needs


def has_slow_pairs(features: frozenset[str]) -> bool:
    """Return whether a CPU with these features adds pairs of bfloat16 more slowly than single numbers.

    Intel's do: an Emerald Rapids adds 32 products of pairs in two cycles, and 64 of floats (AMD's Zen 4: 64 and 32).
    Prompts in bfloat16 took 1.5 times as long by pairs, and torch, which multiplies so too, as long as these.
    """
    return "avx512_bf16" in features and cpu_name().startswith("Intel")


def bfloat16_is_faster() -> bool:
    """Return whether torch multiplies matrices of bfloat16 faster than of float32 on this CPU."""
    features = instruction_sets()
    return "amx_bf16" in features or ("avx512_bf16" in features and SLOW_PAIRS not in features)


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


# -- memory ------------------------------------------------------------------------------------------


def host_memory(root: Path = ROOT) -> tuple[int, int]:
    """Return total and free bytes, within the container's limit.

    Free memory includes what the page cache would give back.
    """
    fields = dict(line.split(":") for line in (content_of(root / "proc/meminfo") or "").splitlines() if ":" in line)
    if "MemTotal" not in fields:  # macOS, Windows
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in memory_limits(root):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def gpu_memory(device: torch.device) -> tuple[int, int]:
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def pool_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that one large pool can take; None for a host, which commits memory only on use."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # torch gives back what nobody holds, except for gaps between tensors, where no pool fits
    return gpu_memory(device)[1]


# -- pages that are given back ---------------------------------------------------------------------------


def trim() -> None:
    """Give back the freed memory that malloc keeps in all threads' arenas; with glibc only."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)


# -- a container's limits ----------------------------------------------------------------------------


def cpu_quotas(root: Path = ROOT) -> Iterator[float]:
    """Return the cores that each control group around this process grants, where it limits them."""
    for directory in control_groups("cpu", root):
        quota, period = (content_of(directory / "cpu.max") or "max 0").split()  # version 2
        if quota == "max":
            quota = content_of(directory / "cpu.cfs_quota_us") or "-1"  # version 1
            period = content_of(directory / "cpu.cfs_period_us") or "0"
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)


def memory_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """Return (limit, used) in bytes of each control group around this process that has a limit."""
    for directory in control_groups("memory", root):
        for limit_file, used_file, cache_field in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
        ):
            limit = content_of(directory / limit_file) or "max"
            if limit != "max":
                statistic = dict(line.split() for line in (content_of(directory / "memory.stat") or "").splitlines())
                yield int(limit), int(content_of(directory / used_file) or 0) - int(statistic.get(cache_field, 0))


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Return the directories of this process's control groups for `controller`, each followed by its parents.

    Format: /proc/self/cgroup holds "id:controllers:path" lines, with no controllers for version 2 (man 7 cgroups).
    """
    base = root / "sys/fs/cgroup"
    for line in (content_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controller if controllers else base
        # Inside a container the path may be the host's and not exist; the mount itself then holds the limits.
        directory = mount / path.lstrip("/")
        yield from (parent for parent in (directory, *directory.parents) if parent.is_relative_to(mount))


def content_of(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


# -- speed -------------------------------------------------------------------------------------------


def read_bandwidth(hardware: Hardware) -> float:
    """Return the bytes per second at which torch's current threads read memory that no cache holds; measured once."""
    return _read_bandwidth(hardware.device, _buffer_bytes(hardware), torch.get_num_threads())


def float_peak(hardware: Hardware, dtype: torch.dtype = torch.float32) -> float:
    """Return operations (two per multiply-add) per second of torch's matmul in `dtype`; measured once per thread
    count.
    """
    return _float_peak(hardware.device, dtype, torch.get_num_threads())


def fp8_peak(hardware: Hardware) -> float | None:
    """Return operations per second of torch's product of FP8 matrices, None where it has none; measured once."""
    return _fp8_peak(hardware.device)


@lru_cache
def _fp8_peak(device: str) -> float | None:
    def build(size: int) -> Callable[[], Tensor]:
        matrix, one = torch.ones(size, size, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
        return lambda: torch._scaled_mm(matrix, matrix.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        return matmul_peak(build, device)
    except (AttributeError, NotImplementedError, RuntimeError):  # this GPU or this build of torch lacks it
        return None


@lru_cache
def bandwidth_here(device: str, threads: int) -> float:
    """Return read_bandwidth of a device as it was found at the first question, for that number of torch's threads.

    Each question else reads what memory is free now, of which the speed does not depend.
    """
    return read_bandwidth(detect(device))


@lru_cache
def _read_bandwidth(device: str, nbytes: int, threads: int) -> float:
    # In large pages, as packed weights are; ones, because pages of zeros may be one page.
    is_host = torch.device(device).type == "cpu"
    memory = in_large_pages(nbytes) if is_host else torch.empty(nbytes, dtype=torch.uint8, device=device)
    buffer = memory[: nbytes // 4 * 4].view(torch.float32).fill_(1)
    return buffer.nbytes / least_seconds(buffer.sum, device)


def _buffer_bytes(hardware: Hardware) -> int:
    """Return eight times the size of the last cache, so that it holds little of the buffer from the pass before."""
    wanted = 8 * (hardware.l3_bytes or hardware.l2_bytes or 16 * MIB)
    if hardware.compute_capability:
        wanted = 1024 * MIB
    return min(max(wanted, 64 * MIB), 1024 * MIB, (hardware.free_memory or 256 * MIB) // 4)


@lru_cache
def _float_peak(device: str, dtype: torch.dtype, threads: int) -> float:
    def build(size: int) -> Callable[[], Tensor]:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        return lambda: matrix @ matrix

    return matmul_peak(build, device)


def matmul_peak(build: Callable[[int], Callable[[], Tensor]], device: str) -> float:
    """Return operations per second of the square matmul that `build(size)` prepares, the better of two sizes."""
    peak = 0.0
    for size in (512, 1024) if device == "cpu" else (2048, 8192):
        seconds = least_seconds(build(size), device)
        peak = max(peak, 2 * size**3 / seconds)
        if seconds > 0.03:  # a dtype that this machine emulates: the larger size would take a second
            break
    return peak


def least_seconds(run: Callable[[], object], device: str) -> float:
    """Return the least wall time of a call of `run`, after one to warm up: of two calls, or of up to 7 in 50 ms."""
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < 8 and sum(seconds[1:]) < 0.05):
        start = time.perf_counter()
        run()
        if device != "cpu":  # a GPU runs on after the call
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
