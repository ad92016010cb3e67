"""Compiles the kernels into a shared library. `pip install` and `python -m hf_accel.kernels.cpu.build` run this.

This file uses only the standard library and does not import hf_accel, because torch may not be installed when it runs.
The library works with every version of torch and Python, because it uses neither and has a C interface.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SOURCE = HERE / "src"
LIBRARY = "libhf_accel_cpu.so"
SHARED = "what all instruction sets share"  # the first round of compiling
REASON = "not_built.txt"  # a file that says why there is no library; the plan shows its text

COMMON = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    # Two of these switch off false warnings about gcc 12's own intrinsics; the last one is for clang, which knows one.
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option",
]  # fmt: skip
MACOS = ["-mmacosx-version-min=11.0"]  # the oldest version that a wheel may name, whatever this one is
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-DHFA_AVX2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-DHFA_AVX512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-DHFA_BF16"]
DOTPROD = ["-DHFA_NEON", "-DHFA_DOTPROD"]

# The compiler flags of each level of hardware.ISA_LEVELS. -march=native is never used, because the library may be
# built on one machine and run on another.
LEVELS: dict[str, list[str]] = {
    "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-DHFA_AMX", "-DHFA_TILES"],
    "avx512_vnni_bf16": AVX512_BF16,
    "avx512_vnni": AVX512,
    "avx_vnni": [*AVX2, "-mavxvnni", "-DHFA_AVX_VNNI"],
    "avx2": AVX2,
    "neon_i8mm": [*DOTPROD, "-march=armv8.2-a+dotprod+i8mm", "-DHFA_I8MM"],
    "neon_dotprod": [*DOTPROD, "-march=armv8.2-a+dotprod"],
    "neon": ["-march=armv8-a", "-DHFA_NEON"],
    "portable": [],
    "avx2_tiles": [*AVX2, "-DHFA_TILES"],
}

# Other levels are not built with sanitizers: they have the same code and would take minutes to compile.
SANITIZED_LEVELS = ("avx512_vnni_bf16", "avx2", "avx2_tiles", "neon_dotprod", "neon")


class BuildError(Exception):
    """An error that says why there is no library, as a clause that a plan can print."""


def build(target: Path = HERE / LIBRARY, *, sanitize: bool = False, only: Sequence[str] = tuple(LEVELS)) -> list[str]:
    """Compile every level of the compiler's processor that it supports, link them to `target`, and return the levels.

    only: the levels to compile of these. Raises BuildError if there is no compiler or it fails. An older library then
    stays as it was.
    """
    compiler = find_compiler()
    common = [*COMMON, *(SANITIZE if sanitize else [])]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        machine = _target(compiler)
        common += [*_openmp(compiler, scratch), *(MACOS if "darwin" in machine else [])]
        known = [level for level in levels_for(machine.split("-")[0]) if level in only]
        wanted = [level for level in known if not sanitize or level in SANITIZED_LEVELS] or ["portable"]
        levels = [level for level in wanted if _accepts(compiler, LEVELS[level], scratch)]
        (scratch / "levels.inc").write_text("".join(f"HFA_LEVEL({level})\n" for level in levels))
        jobs = _jobs(levels, scratch)
        _compile(jobs, [compiler, *common])
        linked = scratch / LIBRARY
        _run([compiler, *common, "-shared", *(str(job.made) for job in jobs), "-o", str(linked)])
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(linked, temporary)
        os.replace(temporary, target)  # a process that has loaded the old library can go on using it
    return levels


class Compilation(NamedTuple):
    """A file to compile. level: what it is compiled for, as the progress names it. made: the object file."""

    level: str
    source: Path
    made: Path
    flags: list[str]


def _jobs(levels: Sequence[str], scratch: Path) -> list[Compilation]:
    """All files, level by level. scratch: the folder of object files, and of levels.inc."""
    shared = [
        Compilation(SHARED, source, scratch / f"{source.stem}.o", [f"-I{scratch}"])
        for source in sorted(SOURCE.glob("*.cpp"))
    ]
    return shared + [
        Compilation(
            level,
            source,
            scratch / f"{source.stem}.{level}.o",
            [*LEVELS[level], f"-DHFA_NAMESPACE=hfa_{level}", f"-DHFA_TABLE=hfa_table_{level}"],
        )
        for level in levels
        for source in sorted((SOURCE / "kernels").glob("*.cpp"))
    ]


def _compile(jobs: Sequence[Compilation], command: Sequence[str]) -> None:
    """Run the compiler for all jobs, and say which levels are done: together they take minutes."""
    rounds = list(dict.fromkeys(job.level for job in jobs))
    _say(f"compiling {len(jobs)} files for {len(rounds) - 1} instruction sets, with {os.cpu_count()} at a time")
    start = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda job: _run([*command, *job.flags, "-c", str(job.source), "-o", str(job.made)]), jobs)
        for job, following in zip(jobs, [*jobs[1:], None], strict=True):
            next(done)
            if following is None or following.level != job.level:
                number = rounds.index(job.level) + 1
                _say(f"{number} of {len(rounds)}: {job.level}, after {time.monotonic() - start:.0f} s")


def _say(text: str) -> None:
    """pip shows it with -v."""
    print(f"cpu kernels: {text}", file=sys.stderr, flush=True)


def build_or_note(folder: Path = HERE) -> None:
    """Build the library in `folder`, or write there why it cannot be built. So an installation never fails.

    If it cannot be built, an older library is deleted, because its interface may differ from these sources.
    """
    reason = folder / REASON
    try:
        build(folder / LIBRARY)
        reason.unlink(missing_ok=True)
    except BuildError as error:
        _say(f"not built ({error})")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LIBRARY).unlink(missing_ok=True)
        reason.write_text(str(error), encoding="utf-8")


def find_compiler() -> str:
    """Return the compiler in the environment variable CXX, or the first usual one that is installed.

    A cross compiler, such as CXX=aarch64-linux-gnu-g++, makes the library of its target. Raises BuildError if there
    is none.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError("no compiler" if len(names) > 1 else f"no compiler {names[0]!r}")
    return found


def levels_for(processor: str) -> list[str]:
    """Return the levels of a processor by its name in platform.machine() or in a compiler's target, best first."""
    x86, arm = (processor.lower() in names for names in (("x86_64", "amd64"), ("aarch64", "arm64")))
    return [level for level in LEVELS if level == "portable" or (arm if level.startswith("neon") else x86)]


def _target(compiler: str) -> str:
    """Return the target of a compiler, such as x86_64-linux-gnu or arm64-apple-darwin23.5.0."""
    result = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or f"{platform.machine()}-{platform.system()}".lower()


def _openmp(compiler: str, scratch: Path) -> list[str]:
    """Return the flag for OpenMP, if the compiler supports it. Apple's does not; the kernels then use one thread."""
    code = "#include <omp.h>\nint main() { return omp_in_parallel(); }\n"
    return ["-fopenmp"] if _accepts(compiler, ["-fopenmp"], scratch, code) else []


def _accepts(compiler: str, flags: list[str], scratch: Path, code: str = "int main() { return 0; }\n") -> bool:
    probe = scratch / "probe.cpp"
    probe.write_text(code)
    command = [compiler, "-Werror", *flags, str(probe), "-o", str(scratch / "probe")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.stderr.write(result.stderr)
        first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
        raise BuildError(f"the compiler failed: {first.strip()}")
    sys.stderr.write(result.stderr)


if __name__ == "__main__":
    try:
        built = build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / LIBRARY, sanitize="--sanitize" in sys.argv)
    except BuildError as error:
        sys.exit(f"cpu kernels: not built ({error})")
    print(f"cpu kernels: built for {', '.join(built)}")
