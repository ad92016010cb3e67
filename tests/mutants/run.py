"""`make mutants`: break one line of a copy of the tree at a time, and see that the tests named for it fail.

The working tree is never written to. First all named tests must pass on the copy as it is. torch and transformers are
imported once: each mutant is tested in a fork of this process, which has not imported hf_accel.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from .table import ROOT, Mutant, mutants

KERNELS = Path("hf_accel", "kernels", "cpu")
LIBRARY = KERNELS / "libhf_accel_cpu.so"
NOT_COPIED = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
SECONDS = 900  # for the tests of one mutant; hanging is not failing
PASSED, FAILED = 0, 1  # exit codes of pytest; others are errors of the run itself
NOT_BUILT = 99

LEVEL = "from hf_accel.kernels.cpu import isa, refusal; print('' if refusal() else isa())"
BUILD = """
import sys
sys.path.insert(0, sys.argv[1])
import build
build.LEVELS = {sys.argv[2]: build.LEVELS[sys.argv[2]]}
build.build()
"""


@dataclass
class Copy:
    """A copy of the tree, its kernels compiled for one instruction set, and what is being tested in it."""

    root: Path
    level: str
    built: bytes = b""
    mutant: Mutant | None = None
    process: BaseProcess | None = None
    deadline: float = 0.0
    saved: bytes = field(default=b"", repr=False)

    def make(self, built: bytes | None = None) -> None:
        """built: the kernels, if they are compiled already."""
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        if built is None and self.level:
            build(self.root, self.level)
            built = (self.root / LIBRARY).read_bytes()
        self.built = built or b""
        if self.built:
            (self.root / LIBRARY).write_bytes(self.built)

    @property
    def output(self) -> Path:
        return self.root.with_suffix(".txt")

    def start(self, tests: list[str], mutant: Mutant | None = None) -> None:
        """Raises ValueError for a mutant that cannot be made."""
        if mutant is not None:
            self.saved = (self.root / mutant.file).read_bytes()
            mutant.apply(self.root)
        level = self.level if mutant is not None and mutant.is_native else ""
        self.mutant, self.deadline = mutant, time.monotonic() + SECONDS
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run_tests, args=(self.root, tests, self.output, level))
        self.process.start()

    def finish(self) -> tuple[int | None, str]:
        """The exit code of what was started, or None if it was stopped, and its output. The tree is whole again."""
        assert self.process is not None
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        code = self.process.exitcode
        if self.mutant is not None:
            (self.root / self.mutant.file).write_bytes(self.saved)
            if self.mutant.is_native:
                (self.root / LIBRARY).write_bytes(self.built)
        self.mutant = self.process = None
        return (None if code is not None and code < 0 else code), self.output.read_text(encoding="utf-8")


def build(root: Path, level: str) -> None:
    """Compile the kernels of a tree for one instruction set. Raises CalledProcessError if that fails."""
    subprocess.run([sys.executable, "-c", BUILD, str(root / KERNELS), level], check=True)


def run_tests(root: Path, tests: list[str], output: Path, level: str) -> None:
    """In a process of its own. level: the kernels are compiled for it first, if it is not empty."""
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(root)
    # no bytecode: a file that changes within a second, and not in length, would be taken for the old one
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    import pytest

    if level:
        try:
            build(root, level)
        except subprocess.CalledProcessError:
            os._exit(NOT_BUILT)
    code = pytest.main(["-x", "-p", "no:cacheprovider", "--tb=no", "--assert=plain", *tests])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def verdict(code: int | None, output: str) -> tuple[bool, str]:
    """Whether a mutant was killed, and what to say about it."""
    lines = [line.removeprefix("FAILED ") for line in output.splitlines() if line.startswith("FAILED ")]
    if code == FAILED and lines:
        return True, f"killed by {lines[0].partition(' - ')[0]}"
    if code == PASSED:
        return False, "SURVIVED"
    how = {None: f"stopped after {SECONDS} seconds or by a signal", NOT_BUILT: "does not compile"}
    return False, f"NOT TRIED: {how.get(code, f'pytest ended with {code}')}\n{output[-2000:]}"


def test_all(chosen: list[Mutant], copies: list[Copy]) -> int:
    """How many were not killed. Each copy takes the next mutant when it is free."""
    left, survivors = list(reversed(chosen)), 0
    while left or any(copy.process for copy in copies):
        for copy in copies:
            if copy.process is None and left:
                mutant = left.pop()
                copy.start(list(mutant.tests), mutant)
        wait([copy.process.sentinel for copy in copies if copy.process is not None], timeout=1)
        for copy in copies:
            done = copy.process is not None and (not copy.process.is_alive() or time.monotonic() > copy.deadline)
            if done and (mutant := copy.mutant) is not None:
                killed, said = verdict(*copy.finish())
                survivors += not killed
                print(f"{mutant.file}: {mutant.name}: {said}", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of names or files; none: all")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="copies to work in at a time")
    options = parser.parse_args()
    chosen = [m for m in mutants() if not options.only or any(o in m.name or o in m.file for o in options.only)]
    level = subprocess.run([sys.executable, "-c", LEVEL], capture_output=True, text=True, check=True, cwd=ROOT)
    if not (isa := level.stdout.strip()):
        print("not tried, because there are no kernels here:", *(m.name for m in chosen if m.is_native), sep="\n  ")
        chosen = [m for m in chosen if not m.is_native]
    if not chosen:
        print("no mutant has such a name or file")
        return 2
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    import transformers.trainer  # noqa: F401  # and torch: for all forks

    with tempfile.TemporaryDirectory() as folder:
        isa = isa if any(mutant.is_native for mutant in chosen) else ""
        copies = [Copy(Path(folder, str(number)), isa) for number in range(options.jobs)]
        copies[0].make()
        copies[0].start(sorted({test for mutant in chosen for test in mutant.tests}))
        for copy in copies[1:]:
            copy.make(copies[0].built)
        wait([copies[0].process.sentinel])  # type: ignore[union-attr]
        code, output = copies[0].finish()
        if code != PASSED:
            print(f"the tests do not pass without any mutant:\n{output[-4000:]}")
            return 2
        survivors = test_all(chosen, copies)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
