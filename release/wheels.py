"""Makes the wheels of a release on one Linux machine, checks them, and runs their kernels where something can.

python -m release.wheels [NAME...] [--out dist]    NAME: of release/targets.py; without one, all

zig compiles them, a compiler for every target that `pip install ziglang` installs. Kernels for this machine run in a
fresh virtual environment, those for ARM under qemu-aarch64, those for Windows under wine, where these are installed;
those for macOS run nowhere but on macOS. The last lines say what was run.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.emulated.kernel_tests import ARM_CPUS, compared_calls, compile_driver, missing

from .targets import KERNELS, TARGETS, Target, faults

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
BUILD = """
import sys, setuptools.build_meta as backend
backend.build_wheel(sys.argv[1], {"--build-option": f"--plat-name {sys.argv[2]}"})
"""
GLIBC_FOR_ARM = Path("/usr/aarch64-linux-gnu")  # of Debian's libc6-arm64-cross
LEVEL_OF_WINDOWS = "avx2"


class ReleaseError(Exception):
    """A wheel that could not be made, or that is not what it should be."""


def compiler(target: Target) -> list[str]:
    return [sys.executable, "-m", "ziglang", "c++", "-target", target.compiled_for]


def make(target: Target, out: Path) -> Path:
    """Make a wheel of a copy of the sources, in which no earlier build has left anything."""
    with tempfile.TemporaryDirectory() as folder:
        tree, made = Path(folder, "tree"), Path(folder, "made")
        made.mkdir()
        ignored = shutil.ignore_patterns("*.so", "*.dll", "__pycache__", "not_built.txt")
        shutil.copytree(ROOT / "hf_accel", tree / "hf_accel", ignore=ignored)
        for name in SOURCES:
            shutil.copy(ROOT / name, tree)
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(made), target.tag], cwd=tree, check=False, text=True,
            env={**os.environ, "CXX": shlex.join(compiler(target))}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        if done.returncode:
            raise ReleaseError(f"{target.name}: {done.stderr}")
        (wheel,) = made.iterdir()
        found = list(faults(wheel, target))
        if found:
            raise ReleaseError(f"{target.name}: {'; '.join(found)}\n{done.stderr}")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


# -- runs ----------------------------------------------------------------------------------------------


def run_here(wheel: Path, target: Target, scratch: Path) -> str:
    """Patch a model and generate in a fresh virtual environment, without a compiler, outside of this tree."""
    if platform.system() != "Linux" or platform.machine() != target.processor:
        return "not run: this is another machine"
    environment = scratch / "environment"
    venv.create(environment)
    (site,) = environment.glob("lib/python*/site-packages")
    import torch

    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    smoke = shutil.copy(ROOT / "release" / "smoke.py", scratch)
    done = subprocess.run(
        [environment / "bin" / "python", smoke], cwd=scratch, env={"PATH": str(scratch), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ReleaseError(f"{target.name}: {done.stdout}{done.stderr}")
    return f"in a fresh environment: {done.stdout.strip()}"


def run_emulated(
    wheel: Path,
    target: Target,
    scratch: Path,
    *,
    driver: str,
    commands: Callable[[Path, Path], Mapping[str, Sequence[str]]],
    has_own_exp: bool = False,
) -> str:
    """Run the kernels' tests with the library of a wheel. commands: of a driver and a library, by level.

    has_own_exp: see compared_calls.
    """
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract(f"{KERNELS}/{target.library}", scratch))
    compile_driver(compiler(target), scratch / driver)
    by_level = commands(scratch / driver, library)
    try:
        calls = compared_calls(by_level, has_own_exp=has_own_exp)
    except AssertionError as error:
        raise ReleaseError(f"{target.name}: {error}") from error
    near = f", but for last bits of {calls.near} tensors, by another C library's exp and log" if calls.near else ""
    return f"{' '.join(by_level)}: {calls.compared} calls have the bits of this machine's kernels{near}"


def run_on_arm(wheel: Path, target: Target, scratch: Path) -> str:
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    reason = missing(qemu or "qemu-aarch64")
    if reason is None and not GLIBC_FOR_ARM.exists():
        reason = f"needs {GLIBC_FOR_ARM} (libc6-arm64-cross)"
    if reason is not None:
        return f"not run: {reason}"

    def commands(driver: Path, library: Path) -> dict[str, list[str]]:
        start = [str(qemu), "-L", str(GLIBC_FOR_ARM)]
        return {level: [*start, "-cpu", cpu, str(driver), str(library), level] for level, cpu in ARM_CPUS.items()}

    return "qemu: " + run_emulated(wheel, target, scratch, driver="driver", commands=commands)


def run_on_windows(wheel: Path, target: Target, scratch: Path) -> str:
    wine = shutil.which("wine") or shutil.which("wine64")
    reason = missing(wine or "wine", level=LEVEL_OF_WINDOWS)
    if reason is not None:
        return f"not run: {reason}"

    def commands(driver: Path, library: Path) -> dict[str, list[str]]:
        return {LEVEL_OF_WINDOWS: ["env", "WINEDEBUG=-all", str(wine), str(driver), f"Z:{library}", LEVEL_OF_WINDOWS]}

    done = run_emulated(wheel, target, scratch, driver="driver.exe", commands=commands, has_own_exp=True)
    return f"wine: {done}"


def run_nowhere(wheel: Path, target: Target, scratch: Path) -> str:
    return "not run: nothing here runs programs of macOS"


RUNS = {
    "linux-x86_64": run_here,
    "linux-aarch64": run_on_arm,
    "macos-arm64": run_nowhere,
    "windows-x86_64": run_on_windows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make and check the wheels of a release.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TARGETS)}; without one, all")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(TARGETS))
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(TARGETS)}")
    rows = []
    for name in asked.names or TARGETS:
        target = TARGETS[name]
        wheel = make(target, asked.out)
        print(f"{wheel} is made", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(
                f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB\n    {RUNS[name](wheel, target, Path(folder))}"
            )
    print("\n".join(rows))


if __name__ == "__main__":
    try:
        main()
    except ReleaseError as error:
        sys.exit(str(error))
