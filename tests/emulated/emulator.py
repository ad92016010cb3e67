"""A plugin for pytest, under which the kernels run on an emulated CPU or system. kernel_tests.py runs pytest with it.

The tests then pass their tensors to kernels of another architecture: each call goes to driver.cpp with all memory that
its pointers reach, and what comes back is written to that memory. The kernels of this machine compute each call too,
and the results must have the same bits.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
import subprocess
from collections.abc import Callable, Iterator
from ctypes import Structure
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_accel.hardware import device
from hf_accel.kernels.cpu import library
from hf_accel.kernels.cpu.library import Linear, Matrix
from hf_accel.kernels.cpu.low_rank import LowRank
from hf_accel.kernels.cpu.row_conv import RowNorm

# What `install` is given, in JSON; commands: for each level, best first, what runs its driver.
SETTINGS = "HF_ACCEL_EMULATED"
NEAR = 1e-5  # of float32 numbers, and of their size, between the exp and log of two C libraries
LIKE_NEON = "avx2"  # the level of this machine that has NEON's lanes, and so the same bits
INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Region:
    """The memory of a tensor's storage."""

    address: int
    size: int
    dtype: torch.dtype

    def holds(self, pointer: int) -> bool:
        return self.address <= pointer < self.address + self.size

    def overlaps(self, other: Region) -> bool:
        return self.address < other.address + other.size and other.address < self.address + self.size


class Memory:
    """The storages whose addresses somebody asked for. One that overlaps another shows that the other was freed."""

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}

    def watch(self) -> None:
        """Note each storage whose address is asked for from now on."""
        ask = torch.Tensor.data_ptr

        def data_ptr(tensor: Tensor) -> int:
            storage = tensor.untyped_storage()
            self.note(Region(storage.data_ptr(), storage.nbytes(), tensor.dtype))
            return ask(tensor)

        torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign, assignment]

    def note(self, region: Region) -> None:
        if self.regions.get(region.address) != region:
            self.regions = {a: known for a, known in self.regions.items() if not known.overlaps(region)}
            self.regions[region.address] = region

    def find(self, pointer: int) -> Region:
        """The region that a pointer is in; one of no bytes for a pointer that no kernel may read from."""
        return next((r for r in self.regions.values() if r.holds(pointer)), Region(pointer, 0, torch.uint8))


@dataclass
class Call:
    """What a call reaches: its regions of memory, the first of which is its struct, and the pointers among them."""

    memory: Memory
    regions: list[Region] = field(default_factory=list)
    pointers: list[tuple[int, int, int, int]] = field(default_factory=list)
    structs: set[int] = field(default_factory=set)  # the regions that hold pointers, which are others there

    def add(self, region: Region) -> int:
        if region not in self.regions:
            self.regions.append(region)
        return self.regions.index(region)

    def add_struct(self, kind: type[Structure], address: int, count: int = 1) -> int:
        size = ctypes.sizeof(kind)
        index = self.add(Region(address, size * count, torch.uint8))
        self.structs.add(index)
        for number in range(count):
            for at, name, parent in pointers_of(kind, kind.from_address(address + number * size)):
                self.add_pointer((index, number * size + at), name, parent)
        return index

    def add_pointer(self, place: tuple[int, int], name: str, parent: Structure) -> None:
        value = getattr(parent, name)
        pointer = (value if isinstance(value, int | None) else ctypes.cast(value, ctypes.c_void_p).value) or 0
        if not pointer:
            return
        if name in STRUCTS:
            kind, count = STRUCTS[name]
            target, offset = self.add_struct(kind, pointer, count(self.memory, parent, pointer)), 0
        elif name == "known":  # whether all numbers were: a byte of ctypes
            target, offset = self.add(Region(pointer, 1, torch.uint8)), 0
        else:
            region = self.memory.find(pointer)
            target, offset = self.add(region), pointer - region.address
        self.pointers.append((*place, target, offset))


def _one(memory: Memory, parent: Structure, pointer: int) -> int:
    return 1


# What pointers of these names lead to are structs with pointers of their own, so many of them.
STRUCTS: dict[str, tuple[type[Structure], Callable[[Memory, Any, int], int]]] = {
    **dict.fromkeys(("linear", "up", "down"), (Linear, _one)),
    "matrices": (Matrix, lambda memory, parent, pointer: parent.count),
    "norm": (RowNorm, _one),
    "parts": (LowRank, lambda memory, parent, pointer: memory.find(pointer).size // ctypes.sizeof(LowRank)),
}


def pointers_of(kind: type[Structure], value: Structure, start: int = 0) -> Iterator[tuple[int, str, Structure]]:
    """(place, name, struct that it is a field of) of each pointer of a struct and of those within it."""
    for name, inner in kind._fields_:  # type: ignore[misc]
        at = start + getattr(kind, name).offset
        if issubclass(inner, Structure):
            yield from pointers_of(inner, getattr(value, name), at)
        elif issubclass(inner, ctypes.c_void_p | ctypes._Pointer):
            yield at, name, value


class Emulated:
    """Stands for the library: what library.py asks of it, with kernels on another CPU."""

    def __init__(self, native: ctypes.CDLL, commands: dict[str, list[str]], *, has_own_exp: bool) -> None:
        self.native, self.commands, self.has_own_exp = native, commands, has_own_exp
        self.memory, self.calls, self.error = Memory(), 0, b""
        self.near = 0  # regions of calls that are not equal to the bit
        self.drivers: dict[str, subprocess.Popen[bytes]] = {}
        self.memory.watch()
        self.hfa_select(next(iter(commands)).encode())

    def hfa_select(self, level: bytes) -> int:
        if level.decode() not in self.commands:
            return 1
        self.level = level.decode()
        self.same = LIKE_NEON if is_arm(self.level) else self.level
        assert self.native.hfa_select(self.same.encode()) == 0
        return 0

    def hfa_error(self) -> bytes:
        return self.error

    def __getitem__(self, function: str) -> Any:
        name = function.removeprefix("hfa_")

        def run(packed: bytes) -> int:
            return self.run(name, packed)

        return run

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        if self.level not in self.drivers:
            self.drivers[self.level] = subprocess.Popen(
                self.commands[self.level], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self.drivers[self.level]

    def run(self, name: str, packed: bytes) -> int:
        own = ctypes.create_string_buffer(packed, len(packed))
        call = Call(self.memory)
        call.add_struct(library._structs[name], ctypes.addressof(own))
        answers = self.ask(name, call)
        if answers is None:
            return 1
        assert self.native[f"hfa_{name}"](packed) == 0
        for index, (region, answer) in enumerate(zip(call.regions, answers, strict=True)):
            if index not in call.structs:
                self.compare(name, region, answer)
        self.calls += 1
        return 0

    def ask(self, name: str, call: Call) -> list[bytes] | None:
        """The bytes of the call's regions after it ran on the other CPU; None after an error."""
        send = self.driver.stdin
        assert send is not None
        send.write(struct.pack("<32sqq", name.encode(), len(call.regions), len(call.pointers)))
        for region in call.regions:
            send.write(struct.pack("<q", region.size) + ctypes.string_at(region.address, region.size))
        send.write(b"".join(struct.pack("<4q", *pointer) for pointer in call.pointers))
        send.flush()
        (length,) = struct.unpack("<q", self.read(8))
        if length:
            self.error = self.read(length)
            return None
        return [self.read(region.size) for region in call.regions]

    def read(self, size: int) -> bytes:
        assert self.driver.stdout is not None
        answer = self.driver.stdout.read(size)
        if len(answer) < size:
            raise RuntimeError(f"{' '.join(self.driver.args)} ended with status {self.driver.wait()}")  # type: ignore[arg-type]
        return answer

    def compare(self, name: str, region: Region, answer: bytes) -> None:
        """Write the other CPU's result to the region, if this machine's is the same, or near where exp is another.

        NaN is equal to NaN.
        """
        here = ctypes.string_at(region.address, region.size)
        if here == answer:
            return
        ctypes.memmove(region.address, answer, region.size)
        if region.dtype.is_floating_point and region.dtype.itemsize > 1:
            ours, others = (torch.frombuffer(bytearray(b), dtype=region.dtype) for b in (here, answer))
            bits = INTEGERS[region.dtype.itemsize]
            differ = (ours.view(bits) != others.view(bits)) & ~(ours.isnan() & others.isnan())
            if not differ.any():
                return
            limit = max(NEAR, 2 * torch.finfo(region.dtype).eps)
            if self.has_own_exp and torch.allclose(ours, others, rtol=limit, atol=NEAR, equal_nan=True):
                self.near += 1
                return
            pairs = torch.stack((ours[differ], others[differ]), 1)[:4].tolist()
            raise AssertionError(f"{name}: {int(differ.sum())} of {len(differ)} differ from {self.same}: {pairs}")
        raise AssertionError(f"{name}: bytes of {region.dtype} differ from {self.same}")


def is_arm(level: str) -> bool:
    return level.startswith("neon")


def install(commands: dict[str, list[str]], *, has_own_exp: bool) -> Emulated:
    """Let hf_accel find the emulated CPU, which has the best of the levels, and its kernels.

    has_own_exp: whether its kernels call the exp and log of another C library than this machine's.
    """
    emulated = Emulated(library._library(), commands, has_own_exp=has_own_exp)
    features = dict.fromkeys(device.ISA_LEVELS[emulated.level].needs, True)
    torch.cpu.get_capabilities = lambda: features  # type: ignore[assignment]
    if is_arm(emulated.level):
        platform.machine = lambda: "aarch64"
    device.instruction_sets.cache_clear()
    library._library = lambda: emulated  # type: ignore[assignment, return-value]
    library._selected.append(emulated.level)
    return emulated


if SETTINGS in os.environ:
    EMULATED = install(**json.loads(os.environ[SETTINGS]))


def runs(item: pytest.Item) -> bool:
    """Whether a test is of an emulated level. The better levels differ from the last one in integer products alone."""
    level = item.callspec.params.get("isa") if hasattr(item, "callspec") else None
    *better, last = EMULATED.commands
    return level == last or (level in better and item.path.name == "test_integer_linear.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"{EMULATED.calls} calls have the bits of this machine's, but for {EMULATED.near} tensors"
    )


def pytest_sessionfinish() -> None:
    for driver in EMULATED.drivers.values():
        driver.communicate()
