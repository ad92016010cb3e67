"""What is known of a wheel without running it: made-up ones, each with one fault that must be found."""

from __future__ import annotations

import re
import struct
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_accel.kernels.cpu.build import levels_for
from release.targets import KERNELS, TARGETS, Target, faults, faults_of_library, kind_of, levels_in
from release.wheels import RUNS

ROOT = Path(__file__).parents[2]
MACHO = b"\xcf\xfa\xed\xfe"
STARTS = {
    "linux-x86_64": b"\x7fELF" + bytes(14) + struct.pack("<H", 62),
    "linux-aarch64": b"\x7fELF" + bytes(14) + struct.pack("<H", 183),
    "macos-arm64": MACHO + struct.pack("<I", 0x0100000C),
    "windows-x86_64": b"MZ" + bytes(58) + struct.pack("<I", 64) + b"PE\0\0" + struct.pack("<H", 0x8664),
}


def library(target: Target, *, levels: list[str] | None = None, more: bytes = b"") -> bytes:
    named = " ".join([*(levels_for(target.processor) if levels is None else levels), ""])
    return STARTS[target.name] + b"hfa_levels: " + named.encode() + b"\0GLIBC_2.17\0" + more


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[..., Path]:
    """A wheel that has no fault, but for what is given."""

    def make(target: Target, *, version: str = "1.2", tag: str = "", **files: bytes) -> Path:
        path = tmp_path / target.file_name("1.2")
        folder = f"hf_accel-{version}.dist-info"
        content = {
            f"{folder}/WHEEL": f"Root-Is-Purelib: false\nTag: py3-none-{tag or target.tag}\n".encode(),
            f"{folder}/METADATA": f"Name: hf_accel\nVersion: {version}\n".encode(),
            "hf_accel/py.typed": b"",
            f"{KERNELS}/{target.library}": library(target),
        }
        content |= {name if "/" in name else f"{KERNELS}/{name}": data for name, data in files.items()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in content.items():
                if data != b"left out":
                    archive.writestr(name, data)
        return path

    return make


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_right_wheel_has_no_fault(wheel: Callable[..., Path], target: Target) -> None:
    assert list(faults(wheel(target), target)) == []


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_library_of_another_platform_is_found(target: Target) -> None:
    for other in TARGETS.values():
        found = list(faults_of_library(library(other, levels=levels_for(target.processor)), target))
        assert bool(found) == (other is not target)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"version": "1.3"}, "its name is not that of its version"),
        ({"tag": "linux_x86_64"}, "its WHEEL has not the tag py3-none-manylinux_2_17_x86_64"),
        ({"libhf_accel_cpu.so": b"left out"}, r"its libraries are \[\]"),
        ({"libhf_accel_cpu.so": b"left out", "not_built.txt": b"no compiler"}, "it has no kernels: no compiler"),
        ({"hf_accel_cpu.dll": b""}, "its libraries are .*hf_accel_cpu.dll"),
        ({"hf_accel/py.typed": b"left out"}, "it has no py.typed"),
    ],
)
def test_a_wrong_wheel_is_found(wheel: Callable[..., Path], given: dict[str, bytes], fault: str) -> None:
    target = TARGETS["linux-x86_64"]
    (found,) = faults(wheel(target, **given), target)
    assert re.match(fault, found)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"levels": ["avx2", "portable"]}, r"its kernels are those of \['avx2', 'portable'\]"),
        ({"more": b"GLIBC_2.9\0GLIBC_2.34\0"}, r"it needs glibc 2\.34"),
        ({"more": b"libgomp.so.1\0libc.so.6\0libstdc++.so.6\0"}, r"it needs libgomp\.so\.1, libstdc\+\+\.so\.6"),
    ],
)
def test_a_wrong_library_is_found(given: dict[str, list[str] | bytes], fault: str) -> None:
    target = TARGETS["linux-x86_64"]
    (found,) = faults_of_library(library(target, **given), target)  # type: ignore[arg-type]
    assert re.fullmatch(fault, found)


def test_what_is_no_library_is_of_no_system() -> None:
    assert kind_of(b"#!/bin/sh") == ("no system", "no processor") and levels_in(b"#!/bin/sh") == []


def test_every_target_is_run_somewhere_or_said_not_to_be() -> None:
    """Here or, by the workflow, on its own system; a page names it."""
    assert RUNS.keys() == TARGETS.keys()
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    for system in ("ubuntu-24.04,", "ubuntu-24.04-arm", "macos-14", "windows-2022"):
        assert system in workflow
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    assert [name for name, target in TARGETS.items() if target.tag not in page] == []


def test_the_version_stands_in_one_number() -> None:
    import hf_accel

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == hf_accel.__version__
