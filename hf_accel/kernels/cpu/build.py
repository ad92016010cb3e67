"""Compiles the kernels into a shared library. `pip install` and `python -m hf_accel.kernels.cpu.build` run this.

This file uses only the standard library and does not import hf_accel, because torch may not be installed when it runs.
The library works with every version of torch and Python, because it uses neither and has a C interface.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SOURCE = HERE / "src"
LIBRARIES = {"windows": "hf_accel_cpu.dll", "": "libhf_accel_cpu.so"}  # by a word in the name of a system, or else
SHARED = "what all instruction sets share"  # the first round of compiling
REASON = "not_built.txt"  # a file that says why there is no library; the plan shows its text

COMMON = [
    "-std=c++17", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
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
    "avx512_bf16_tiles": [*AVX512_BF16, "-DHFA_TILES"],
}

# Levels that differ from another one in linear kernels alone: in tiles, or in the products of bytes. Only the sources
# of these are compiled, and all else is the other's machine code. See HFA_BASE in kernels.h.
BASES = {
    "amx": "avx512_vnni_bf16", "avx_vnni": "avx2", "neon_i8mm": "neon_dotprod", "avx2_tiles": "avx2",
    "avx512_bf16_tiles": "avx512_vnni_bf16",
}  # fmt: skip
OWN_SOURCES = ("float_linear", "integer_linear", "mixture", "table")
BY_TILES = ("attention",)  # what tiles of bfloat16 serve besides

# The names that zig has for processors of ARM.
ZIG_NAMES = {"-march=armv8-a": "-mcpu=generic", "-march=armv8.2-a": "-mcpu=generic+v8_2a"}

# Other levels are not built with sanitizers: they have the same code and would take minutes to compile.
SANITIZED_LEVELS = ("avx512_vnni_bf16", "avx2", "avx2_tiles", "avx512_bf16_tiles", "neon_dotprod", "neon")


class BuildError(Exception):
    """An error that says why there is no library, as a clause that a plan can print."""


def library_name(system: str) -> str:
    """Return the file name of the library on a system, by its name in platform.system() or in a compiler's target."""
    return next(name for word, name in LIBRARIES.items() if word in system.lower())


LIBRARY = library_name(platform.system())


def build(target: Path = HERE, *, sanitize: bool = False, only: Sequence[str] | None = None) -> list[str]:
    """Compile every level of the compiler's processor that it supports, link them to `target`, and return the levels.

    target: a file, or a folder in which the library gets its own name. only: the levels to compile of these; None:
    those of `asked_levels`. Raises BuildError if there is no compiler or it fails. An older library then stays as it
    was.
    """
    only = asked_levels() if only is None else only
    compiler = find_compiler()
    machine = _target(compiler)
    if "mingw32" in machine:
        raise BuildError("g++ for Windows misaligns vectors on the stack (gcc bug 54412); take clang++, or ziglang")
    common = [*COMMON, *(SANITIZE if sanitize else []), *_system_flags(machine)]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        known = [level for level in levels_for(machine.split("-")[0]) if level in only]
        wanted = [level for level in known if not sanitize or level in SANITIZED_LEVELS] or ["portable"]
        levels = [level for level in wanted if _accepts(compiler, level_flags(level, compiler), scratch)]
        (scratch / "levels.inc").write_text("".join(f"HFA_LEVEL({level})\n" for level in levels), encoding="utf-8")
        jobs = _jobs({level: level_flags(level, compiler) for level in levels}, scratch)
        _compile(jobs, [*compiler, *common])
        linked = scratch / library_name(machine)
        _run([*compiler, *common, "-shared", *(str(job.made) for job in jobs), "-o", str(linked)])
        _put(linked, target / linked.name if target.is_dir() else target)
    return levels


def _put(linked: Path, target: Path) -> None:
    """Put the library in its place in one step: a process that has loaded the old one can go on using it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(linked, temporary)
    try:
        os.replace(temporary, target)
    except PermissionError as error:  # Windows keeps what is loaded
        temporary.unlink()
        raise BuildError(f"{target} is in use; end the processes that have loaded it, and build again") from error


class Compilation(NamedTuple):
    """A file to compile. level: what it is compiled for, as the progress names it. made: the object file."""

    level: str
    source: Path
    made: Path
    flags: list[str]


def level_flags(level: str, compiler: Sequence[str]) -> list[str]:
    """Return the flags of a level in the words of a compiler."""
    names = ZIG_NAMES if any(Path(part).stem in ("zig", "ziglang") for part in compiler) else {}

    def translated(flag: str) -> str:
        start, plus, features = flag.partition("+")
        return names.get(start, start) + plus + features

    return [translated(flag) for flag in LEVELS[level]]


def own_sources(level: str) -> tuple[str, ...]:
    """Return the sources that are compiled for a level that has a base."""
    return (*OWN_SOURCES, *BY_TILES) if {"-DHFA_TILES", "-DHFA_BF16"} <= {*LEVELS[level]} else OWN_SOURCES


def _jobs(levels: Mapping[str, Sequence[str]], scratch: Path) -> list[Compilation]:
    """All files, level by level, the largest of a level first, so that no core waits long for the last ones.

    levels: with their flags. scratch: the folder of object files, and of levels.inc.
    """
    jobs = [
        Compilation(SHARED, source, scratch / f"{source.stem}.o", [f"-I{scratch}"])
        for source in sorted(SOURCE.glob("*.cpp"))
    ]
    sources = sorted((SOURCE / "kernels").glob("*.cpp"), key=lambda source: (-source.stat().st_size, source))
    for level, flags in levels.items():
        names = [f"-DHFA_NAMESPACE=hfa_{level}", f"-DHFA_TABLE=hfa_table_{level}"]
        base = BASES.get(level)
        if base in levels:
            names.append(f"-DHFA_BASE=hfa_{base}")
        jobs += [
            Compilation(level, source, scratch / f"{source.stem}.{level}.o", [*flags, *names])
            for source in sources
            if base not in levels or source.stem in own_sources(level)
        ]
    return jobs


def _compile(jobs: Sequence[Compilation], command: Sequence[str]) -> None:
    """Run the compiler for all jobs, and say which levels are done: together they take minutes."""
    rounds = {job.level: [other for other in jobs if other.level == job.level] for job in jobs}
    _say(f"compiling {len(jobs)} files for {len(rounds) - 1} instruction sets, with {os.cpu_count()} at a time")
    start = time.monotonic()
    pool = ThreadPoolExecutor(os.cpu_count())
    headers: dict[str, Future[list[str]]] = {}
    results: list[Future[None]] = []
    try:
        for level, files in rounds.items():
            if level not in BASES and level != SHARED:  # for a few it would take as long as it saves
                headers[level] = pool.submit(_precompile, command, files[0].flags, files[0].made.parent / level)
            results += [pool.submit(_compile_file, command, job, headers.get(level)) for job in files]
        for number, (level, files) in enumerate(rounds.items(), 1):
            for _ in files:
                results.pop(0).result()
            shutil.rmtree(files[0].made.parent / level, ignore_errors=True)  # a precompiled header has 40 MB
            _say(f"{number} of {len(rounds)}: {level}, after {time.monotonic() - start:.0f} s")
    finally:
        pool.shutdown(cancel_futures=True)


def _precompile(command: Sequence[str], flags: Sequence[str], folder: Path) -> list[str]:
    """Precompile what the kernels of a level include, and return the flags to use it: none, if the compiler cannot."""
    folder.mkdir()
    header, probe = folder / "common.h", folder / "probe.cpp"
    header.write_text(f'#include "{(SOURCE / "kernels" / "common.h").resolve().as_posix()}"\n', encoding="utf-8")
    probe.touch()
    use = ["-include", str(header)]  # gcc and clang look for the .gch next to it
    made = _succeeds([*command, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return use if made and _succeeds([*command, *flags, *use, "-c", str(probe), "-o", str(folder / "probe.o")]) else []


def _compile_file(command: Sequence[str], job: Compilation, header: Future[list[str]] | None) -> None:
    use = header.result() if header else []
    _run([*command, *job.flags, *use, "-c", str(job.source), "-o", str(job.made)])


def _say(text: str) -> None:
    """pip shows it with -v."""
    print(f"cpu kernels: {text}", file=sys.stderr, flush=True)


def build_or_note(folder: Path = HERE) -> None:
    """Build the library in `folder`, or write there why it cannot be built. So an installation never fails.

    If it cannot be built, an older library is deleted, because its interface may differ from these sources.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reason = folder / REASON
    try:
        build(folder)
        reason.unlink(missing_ok=True)
    except BuildError as error:
        _say(f"not built ({error})")
        for name in LIBRARIES.values():
            (folder / name).unlink(missing_ok=True)
        reason.write_text(str(error), encoding="utf-8")


def find_compiler() -> list[str]:
    """Return the command of the compiler: the environment variable CXX, or the first usual one that is installed.

    A cross compiler, such as CXX="python -m ziglang c++ -target aarch64-linux-gnu", makes the library of its target.
    Raises BuildError if there is none.
    """
    if given := os.environ.get("CXX"):
        command = [given] if shutil.which(given) else shlex.split(given, posix=os.name != "nt")
        if not shutil.which(command[0]):
            raise BuildError(f"no compiler {command[0]!r}")
        return command
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise BuildError("no compiler")
    return [found]


def levels_for(processor: str) -> list[str]:
    """Return the levels of a processor by its name in platform.machine() or in a compiler's target, best first."""
    x86, arm = (processor.lower() in names for names in (("x86_64", "amd64"), ("aarch64", "arm64")))
    return [level for level in LEVELS if level == "portable" or (arm if level.startswith("neon") else x86)]


def asked_levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the levels that the environment variable HF_ACCEL_LEVELS asks for: "all", which is the default, so that
    the library may be run on another machine; or "native", those that this CPU can run, which is compiled sooner.

    Linux says what an x86 CPU has; elsewhere, and for ARM, "native" is all. Raises BuildError for another word.
    """
    asked = os.environ.get("HF_ACCEL_LEVELS") or "all"
    if asked not in ("all", "native"):
        raise BuildError(f"HF_ACCEL_LEVELS={asked!r} is not known; choose all or native")
    try:
        text = cpuinfo.read_text(encoding="utf-8") if asked == "native" else ""
    except OSError:
        text = ""
    line = next((line for line in text.splitlines() if line.startswith("flags")), None)
    if line is None:
        return list(LEVELS)
    has = {f"m{name.replace('_', '')}" for name in line.partition(":")[2].split()}  # as flags without their dashes
    needed = {
        level: {flag.replace("-", "") for flag in flags if flag.startswith("-m")} for level, flags in LEVELS.items()
    }
    return [level for level, names in needed.items() if level.startswith("neon") or names <= has]


def _target(compiler: Sequence[str]) -> str:
    """Return the target of a compiler, such as x86_64-linux-gnu or arm64-apple-darwin23.5.0."""
    result = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or f"{platform.machine()}-{platform.system()}".lower()


def _system_flags(machine: str) -> list[str]:
    if "windows" in machine:
        return []
    return ["-fPIC", *(MACOS if "darwin" in machine else [])]


def _accepts(compiler: Sequence[str], flags: Sequence[str], scratch: Path) -> bool:
    probe = scratch / "probe.cpp"
    probe.write_text("int main() { return 0; }\n", encoding="utf-8")
    command = [*compiler, "-Werror", *flags, "-c", str(probe), "-o", str(scratch / "probe.o")]
    return _succeeds(command)


def _succeeds(command: Sequence[str]) -> bool:
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
        built = build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, sanitize="--sanitize" in sys.argv)
    except BuildError as error:
        sys.exit(f"cpu kernels: not built ({error})")
    print(f"cpu kernels: built for {', '.join(built)}")
