"""What needs an NVIDIA GPU, in one call of at most ten minutes: tests with the gpu mark, then benchmarks.

python -m benchmarks.gpu               all parts, in the order of PARTS, as long as time is left
python -m benchmarks.gpu decode-8b     some of them
Each part is a process of its own with a limit of its own, so that one that hangs or fails costs no other. It uses the
Python that runs it, and installs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SECONDS = 590.0  # of all parts
LEAST_SECONDS = 15.0  # a part that has less is not begun
GRACE_SECONDS = 5.0  # in which a part that was interrupted may still say what it has found
OURS = "hf_accel exact,hf_accel int8,hf_accel int4"
AND_DETERMINISTIC = ("--setups", f"{OURS},hf_accel int4 deterministic")
MODEL_TESTS, KERNEL_TESTS = "tests/parity/test_gpu.py", "tests/unit"


@dataclass(frozen=True)
class Part:
    """command: arguments of Python. seconds: the most that it may take."""

    name: str
    command: tuple[str, ...]
    seconds: float


def benchmark(name: str, model: str, topics: str, *options: str, seconds: float) -> Part:
    shared = ("--device", "cuda", "--model", model, "--setups", OURS, "--even-busy", "--label", model)
    return Part(name, ("-m", "benchmarks.run", *topics.split(), *shared, *options), seconds)


def tests(name: str, path: str, *, seconds: float) -> Part:
    """Without what cannot be imported here: the packages of developers need not be installed."""
    options = ("-q", "-m", "gpu and not long", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    return Part(name, ("-m", "pytest", *options, path), seconds)


PARTS = (
    tests("tests-models", MODEL_TESTS, seconds=70),
    benchmark("decode-8b", "bench-8b", "generate decode", "--rounds", "2", seconds=110),
    tests("tests-kernels", KERNEL_TESTS, seconds=110),
    benchmark("batching-8b", "bench-8b", "batching", seconds=140),
    benchmark("decode-1b", "bench-1b", "generate decode", "--rounds", "2", *AND_DETERMINISTIC, seconds=70),
    benchmark("prefill-8b", "bench-8b", "prefill", "--context", "8192", "--rounds", "3", seconds=50),
    benchmark("speculation-1b", "bench-1b", "speculation", "--quick", seconds=60),
    benchmark("speculation-8b", "bench-8b", "speculation", "--quick", seconds=80),
    benchmark("memory-8b", "bench-8b", "memory", seconds=50),
    benchmark("batching-1b", "bench-1b", "batching", seconds=80),
    benchmark("prefill-1b", "bench-1b", "prefill", "--context", "8192", *AND_DETERMINISTIC, seconds=40),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(names)}; left out: all")
    wanted = parser.parse_args(argv).parts
    for name in wanted:
        if name not in names:
            parser.error(f"part {name!r} is not known; choose some of {', '.join(names)}")
    if not torch.cuda.is_available():
        print(f"make gpu needs an NVIDIA GPU, and torch {torch.__version__} sees none here")
        return 1
    return run([part for part in PARTS if not wanted or part.name in wanted], seconds=SECONDS)


def run(parts: Sequence[Part], *, seconds: float) -> int:
    """Run the parts in order; returns 1 if one failed, was ended or was not begun."""
    deadline = time.monotonic() + seconds
    outcomes = []
    for part in parts:
        left = deadline - time.monotonic()
        print(f"== {part.name}", flush=True)
        start = time.monotonic()
        outcome = "there was no time left" if left < LEAST_SECONDS else run_part(part, min(part.seconds, left))
        outcomes.append((part.name, outcome, time.monotonic() - start))
        print(f"== {part.name}: {outcome or 'done'}", flush=True)
    for name, outcome, taken in outcomes:
        print(f"{name:16} {taken:6.1f} s  {outcome or 'done'}")
    return int(any(outcome for _, outcome, _ in outcomes))


def run_part(part: Part, seconds: float) -> str | None:
    """Run a part for at most so many seconds; None if it succeeded, or what went wrong."""
    if part.command[:2] == ("-m", "pytest") and importlib.util.find_spec("pytest") is None:
        return "pytest is not installed"
    # A session of its own, so that processes that the part has started end with it.
    process = subprocess.Popen([sys.executable, *part.command], start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        return f"ended after {seconds:.0f} s, its limit"
    finally:
        end(process)
    return None if code == 0 else f"it failed, exit status {code}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and of those that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
