"""The platforms that have a wheel, and what a wheel must hold, which can be seen without running it."""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_accel.kernels.cpu.build import LIBRARIES, REASON, levels_for, library_name

KERNELS = "hf_accel/kernels/cpu"
OLDEST_GLIBC = (2, 17)
# Libraries that are not part of every Linux. torch brings OpenMP, and the rest is linked statically.
NOT_EVERYWHERE = re.compile(rb"lib(?:gomp|i?omp5?|stdc\+\+|c\+\+|gcc_s|unwind)[-\w.]*\.so[.\d]*")


@dataclass(frozen=True)
class Target:
    """A platform. compiled_for: the target of zig's compiler; tag: the platform in the name of the wheel."""

    name: str
    compiled_for: str
    tag: str

    @property
    def processor(self) -> str:
        return self.compiled_for.partition("-")[0]

    @property
    def library(self) -> str:
        return library_name(self.compiled_for)

    def file_name(self, version: str) -> str:
        return f"hf_accel-{version}-py3-none-{self.tag}.whl"


TARGETS = {
    target.name: target
    for target in (
        Target("linux-x86_64", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64"),
        Target("linux-aarch64", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64"),
        Target("macos-arm64", "aarch64-macos.11.0", "macosx_11_0_arm64"),
        Target("windows-x86_64", "x86_64-windows-gnu", "win_amd64"),
    )
}


def faults(wheel: Path, target: Target) -> Iterator[str]:
    """Yield what is wrong with a wheel: its name, the library in it, the levels of that, what it needs of a system."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        described = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        if f"Tag: py3-none-{target.tag}" not in archive.read(described).decode().splitlines():
            yield f"its WHEEL has not the tag py3-none-{target.tag}"
        metadata = archive.read(described.replace("WHEEL", "METADATA")).decode()
        version = re.search(r"^Version: (.+)$", metadata, re.MULTILINE)
        if version is None or wheel.name != target.file_name(version[1]):
            yield f"its name is not that of its version and of {target.name}"
        libraries = [name for name in names if name.rpartition("/")[2] in LIBRARIES.values()]
        if f"{KERNELS}/{REASON}" in names:
            yield f"it has no kernels: {archive.read(f'{KERNELS}/{REASON}').decode()}"
        elif libraries != [f"{KERNELS}/{target.library}"]:
            yield f"its libraries are {libraries}"
        else:
            yield from faults_of_library(archive.read(libraries[0]), target)
        if "hf_accel/py.typed" not in names:
            yield "it has no py.typed"


def faults_of_library(content: bytes, target: Target) -> Iterator[str]:
    """Yield what is wrong with the bytes of a library."""
    kind, wanted = kind_of(content), (target.compiled_for.split("-")[1].partition(".")[0], target.processor)
    if kind != wanted:
        yield f"its library is for {' on '.join(reversed(kind))}"
    levels = levels_in(content)
    if levels != levels_for(target.processor):
        yield f"its kernels are those of {levels}"
    if kind[0] == "linux":
        versions = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)}
        if max(versions, default=OLDEST_GLIBC) > OLDEST_GLIBC:
            yield f"it needs glibc {'.'.join(map(str, max(versions)))}"
        needed = sorted(set(NOT_EVERYWHERE.findall(content)))
        if needed:
            yield f"it needs {b', '.join(needed).decode()}"


def kind_of(content: bytes) -> tuple[str, str]:
    """Return the system and the processor that a library is for. Formats: ELF, Mach-O (64 bits), PE."""
    if content[:4] == b"\x7fELF":
        (machine,) = struct.unpack_from("<H", content, 18)
        return "linux", {62: "x86_64", 183: "aarch64"}.get(machine, str(machine))
    if content[:4] == b"\xcf\xfa\xed\xfe":
        (machine,) = struct.unpack_from("<I", content, 4)
        return "macos", {0x0100000C: "aarch64", 0x01000007: "x86_64"}.get(machine, str(machine))
    if content[:2] == b"MZ":
        (header,) = struct.unpack_from("<I", content, 0x3C)
        (machine,) = struct.unpack_from("<H", content, header + 4)
        return "windows", {0x8664: "x86_64", 0xAA64: "aarch64"}.get(machine, str(machine))
    return "no system", "no processor"


def levels_in(content: bytes) -> list[str]:
    """Return the levels of which a library says that it has kernels, by hfa_levels of src/api.cpp."""
    found = re.search(rb"hfa_levels: ([\w ]*)\0", content)
    return [] if found is None else found[1].decode().split()
