"""The library itself: how it is found and chosen, and what threads and processes may do to it."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_accel.errors import UnsupportedError
from hf_accel.hardware import ISA_LEVELS
from hf_accel.kernels.cpu import build, isa, library, refusal
from hf_accel.kernels.cpu.float_linear import FloatLinear
from hf_accel.kernels.cpu.row_kernels import topk

built = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


IN_A_FRESH_PROCESS = """
import os, torch
torch.set_num_threads(1)
from hf_accel.kernels.cpu import isa, library
from hf_accel.kernels.cpu.float_linear import FloatLinear
library._library()
library._cores = 8
linear, x = FloatLinear([torch.ones(1000, 8)], [None]), torch.ones(4, 8)
threads = []
for number in (1, 3):
    torch.set_num_threads(number)
    assert (linear(x) == 8).all()
    threads.append(len(os.listdir("/proc/self/task")))
print(isa(), threads[1] - threads[0])
"""


@built
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted in /proc")
def test_environment_chooses_the_instruction_set_and_torch_the_threads() -> None:
    level = isa() if os.environ.get("HF_ACCEL_LIBRARY") else "portable"  # a library of few levels, as when sanitizing
    environment = {**os.environ, "HF_ACCEL_ISA": level}
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == f"{level} 2\n", result.stderr


@built
def test_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ACCEL_ISA", "sse9")
    with pytest.raises(UnsupportedError, match=r"HF_ACCEL_ISA='sse9' is not known; choose one of .*portable"):
        library._library.__wrapped__()


def test_a_library_for_other_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def hfa_select(self, level: bytes) -> int:
            return 1

        def hfa_error(self) -> bytes:
            return b"no kernels for portable"

    monkeypatch.delenv("HF_ACCEL_ISA", raising=False)
    with pytest.raises(
        UnsupportedError, match=r"built for other CPUs \(no kernels for portable\); on this one, run py"
    ):
        library._select(Refuses())


def test_a_level_that_was_not_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyPortable:
        def hfa_select(self, level: bytes) -> int:
            return level != b"portable"

        def hfa_error(self) -> bytes:
            return b"it was not compiled"

    monkeypatch.delenv("HF_ACCEL_ISA", raising=False)
    monkeypatch.setattr(library, "_passed_over", [])
    monkeypatch.setattr(library, "choose_isa", lambda features, *, requested: "avx2")
    monkeypatch.setattr(library, "_possible", lambda: ["avx2", "portable"])
    monkeypatch.setattr(library, "_library", lambda: None)
    assert library.better_level() is None
    assert library._select(OnlyPortable()) == "portable"
    assert library.better_level() == "not avx2: it was not compiled"


def test_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ACCEL_LIBRARY", str(tmp_path / "nowhere.so"))
    monkeypatch.setattr(library, "HERE", tmp_path)
    with pytest.raises(UnsupportedError, match=r"not built \(run python -m hf_accel.kernels.cpu.build\)"):
        library._library.__wrapped__()
    (tmp_path / build.REASON).write_text("no compiler")
    with pytest.raises(UnsupportedError, match=r"not built \(no compiler\)"):
        library._library.__wrapped__()


@built
def test_a_library_of_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library._structs, "norm", library.Linear)
    with pytest.raises(UnsupportedError, match=r"compiled from other sources; run python -m hf_accel.kernels.cpu"):
        library._library.__wrapped__()


@pytest.mark.parametrize(
    ("compiler", "reason"), [("/nonexistent", "no compiler '/nonexistent'"), ("", "no compiler"), ("false", "failed")]
)
def test_installation_without_a_compiler(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / build.LIBRARY).write_text("an older one")
    monkeypatch.setenv("CXX", compiler)
    if compiler != "false":
        monkeypatch.setenv("PATH", "")
    build.build_or_note(tmp_path)
    assert reason in (tmp_path / build.REASON).read_text()
    assert not (tmp_path / build.LIBRARY).exists()  # it may have another interface than the sources


def test_the_build_says_what_it_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = build._jobs({level: build.LEVELS[level] for level in ("avx2", "portable")}, tmp_path)
    build._compile(jobs, ["true"])  # in the place of a compiler
    lines = [line.partition(", after")[0] for line in capsys.readouterr().err.splitlines()]
    assert re.fullmatch(
        rf"cpu kernels: compiling {len(jobs)} files for 2 instruction sets, with \d+ at a time", lines[0]
    )
    rounds = ["what all instruction sets share", "avx2", "portable"]
    assert lines[1:] == [f"cpu kernels: {number} of 3: {name}" for number, name in enumerate(rounds, 1)]


def test_zig_has_names_of_its_own() -> None:
    for compiler in (["/usr/bin/g++"], [sys.executable, "-m", "ziglang", "c++"]):
        flags = {level: build.level_flags(level, compiler) for level in build.LEVELS}
        if "ziglang" not in compiler:
            assert flags == build.LEVELS
    assert "-mcpu=generic+v8_2a+dotprod+i8mm" in flags["neon_i8mm"] and "-mcpu=generic" in flags["neon"]
    assert flags["avx2"] == build.LEVELS["avx2"]


CPUINFO = "processor : 0\nflags : fpu avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni {}\nbugs :\n"


@pytest.mark.parametrize(
    ("more", "best"),
    [
        ("", "avx512_vnni"), ("avx512_bf16", "avx512_vnni_bf16"), ("avx512_bf16 amx_tile amx_int8 amx_bf16", "amx"),
        ("avx_vnni", "avx512_vnni"),
    ],
)  # fmt: skip
def test_native_levels_are_those_of_this_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: str, best: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPUINFO.format(more))
    monkeypatch.setenv("HF_ACCEL_LEVELS", "native")
    found = build.asked_levels(cpuinfo)
    assert found[0] == best and {"avx2", "avx2_tiles", "portable", "neon"} <= {*found}
    assert ("avx_vnni" in found) is (more == "avx_vnni") and ("avx512_bf16_tiles" in found) is ("bf16" in more)
    for elsewhere in (tmp_path / "nowhere", Path(os.devnull)):  # macOS; Linux on ARM, which names no flags
        assert build.asked_levels(elsewhere) == list(build.LEVELS)
    for word in ("all", ""):
        monkeypatch.setenv("HF_ACCEL_LEVELS", word)
        assert build.asked_levels(cpuinfo) == list(build.LEVELS)
    monkeypatch.setenv("HF_ACCEL_LEVELS", "sse9")
    with pytest.raises(build.BuildError, match="HF_ACCEL_LEVELS='sse9' is not known; choose all or native"):
        build.asked_levels(cpuinfo)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux lists what a CPU has")
def test_native_levels_are_those_that_are_chosen_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch knows of this CPU, by which a level is chosen, is what Linux lists."""
    monkeypatch.setenv("HF_ACCEL_LEVELS", "native")
    assert set(library._possible()) <= set(build.asked_levels())


@pytest.mark.parametrize(
    ("given", "found"),
    [("sh", ["sh"]), ("sh -c 'a b'", ["sh", "-c", "a b"]), ("nothing-here -x", "no compiler 'nothing-here'")],
)
def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch, given: str, found: list[str] | str) -> None:
    monkeypatch.setenv("CXX", given)
    if isinstance(found, list):
        assert build.find_compiler() == found
        return
    with pytest.raises(build.BuildError, match=found):
        build.find_compiler()


def test_gnu_compilers_for_windows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their AVX code stops at vectors that it itself has misaligned."""
    compiler = tmp_path / "cross-g++"
    compiler.write_text("#!/bin/sh\necho x86_64-w64-mingw32\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="misaligns vectors"):
        build.build(tmp_path / "library")


def test_a_library_that_is_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows. The old one stays, and nothing else."""
    linked, target = tmp_path / "new", tmp_path / "folder" / "library"
    linked.write_text("new")
    target.parent.mkdir()
    target.write_text("old")

    def refuses(new: Path, old: Path) -> None:
        raise PermissionError(13, "in use", str(old))

    monkeypatch.setattr(os, "replace", refuses)
    with pytest.raises(build.BuildError, match="library is in use; end the processes that have loaded it"):
        build._put(linked, target)
    assert target.read_text() == "old" and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("system", "name"),
    [
        ("Linux", "libhf_accel_cpu.so"), ("Darwin", "libhf_accel_cpu.so"),
        ("aarch64-unknown-macos", "libhf_accel_cpu.so"),
        ("Windows", "hf_accel_cpu.dll"), ("x86_64-unknown-windows-gnu", "hf_accel_cpu.dll"),
    ],
)  # fmt: skip
def test_the_library_has_the_name_that_its_system_expects(system: str, name: str) -> None:
    assert build.library_name(system) == name


def test_every_level_is_of_one_kind_of_processor() -> None:
    kinds = [build.levels_for(name) for name in ("x86_64", "aarch64", "riscv64")]
    assert kinds[2] == ["portable"]
    assert set(kinds[0]) & set(kinds[1]) == {"portable"}
    assert set(kinds[0]) | set(kinds[1]) == set(build.LEVELS) == set(ISA_LEVELS)
    assert build.levels_for("AMD64") == kinds[0] and build.levels_for("arm64") == kinds[1]


def test_a_compiler_says_which_processor_it_is_for(tmp_path: Path) -> None:
    compiler = tmp_path / "cross-g++"
    compiler.write_text("#!/bin/sh\necho aarch64-linux-gnu\n")
    compiler.chmod(0o755)
    assert build._target([str(compiler)]) == "aarch64-linux-gnu"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    assert build._target([str(compiler)]).startswith(platform.machine().lower())


@built
@pytest.mark.usefixtures("two_threads")
def test_several_python_threads_at_once() -> None:
    linear = FloatLinear([torch.randn(300, 200)], [None])
    inputs = [torch.randn(rows, 200) for rows in range(1, 41)]
    expected = [(linear(x), topk(x, 7)[1]) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: (linear(x), topk(x, 7)[1]), inputs * 5))
    for (out, indices), (expected_out, expected_indices) in zip(results, expected * 5, strict=True):
        assert torch.equal(out, expected_out)
        assert torch.equal(indices, expected_indices)


@built
@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_computes_alone() -> None:
    linear, x = FloatLinear([torch.randn(300, 64)], [None]), torch.randn(8, 64)
    expected = linear(x)  # the pool of threads exists now, and the child will not have it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads; they are the point here
        child = os.fork()
    if child == 0:
        os._exit(0 if linear(x).tolist() == expected.tolist() else 3)
    assert exit_status(child, seconds=20) == 0


def exit_status(child: int, *, seconds: float) -> int | None:
    """Of a process, or None if it had to be killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_threads_are_torchs_and_no_more_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for cores, expected in ((1, 1), (2, 2), (64, 3)):
            monkeypatch.setattr(library, "_cores", cores)
            assert library.threads() == expected
    finally:
        torch.set_num_threads(before)
