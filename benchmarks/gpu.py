"""What needs an NVIDIA GPU, in one call of at most ten minutes: tests with the gpu mark, then benchmarks.

python -m benchmarks.gpu               all parts, in the order of PARTS, as long as time is left
python -m benchmarks.gpu 8b --out DIR  some of them, with results and what they print in DIR

Each part is a process of its own with a limit of its own, and each topic in it has one: what hangs or fails costs no
other, and what is measured is written at once. A topic that ends its process is passed over by a second one. It uses
the Python that runs it, and installs nothing. What it prints is short: the rest is in the parts' logs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.features import ATTENTION, LINEARS

from .harness.results_folder import FOLDER, file_stem
from .harness.tables import cell

SECONDS = 570.0  # of all parts, so that ten minutes have room for the beginning and the end
LEAST_SECONDS = 15.0  # a part that has less is not begun
AGAIN_SECONDS = 60.0  # that making the models once more, for the topics that were not reached, is worth
GRACE_SECONDS = 5.0  # in which a part that was interrupted may still say what it has found
LOGS = Path("build") / "gpu"
MOST_PRINTED = 2000  # characters of a log's end
COLUMNS = 3  # of a table's rows that are printed, beside their name
OURS = "hf_accel exact,hf_accel int8,hf_accel fp8,hf_accel int4"
MODEL_TESTS = ("tests/parity/test_gpu.py", "tests/parity/test_gpu_kinds.py")
KERNEL_TESTS = (  # at the same time, as compiling takes more than running; the first has a case for each feature
    ("tests/unit/fused/test_on_gpu.py", *ATTENTION, *LINEARS),
    ("tests/unit/attention/test_paged.py",),
    ("tests/unit/cache", "tests/unit/attention/test_packed.py", "tests/unit/attention/test_dense.py",
     "tests/unit/attention/test_memory.py"),
    ("tests/unit/kernels/triton", "tests/unit/linear"),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """commands: arguments of Python, of processes that run at the same time. seconds: the most that they may take.

    topics: that are added to a benchmark's.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    seconds: float
    topics: tuple[str, ...] = ()


def benchmark(name: str, model: str, topics: str, *options: str, seconds: float, each: float) -> Part:
    """each: seconds of a topic at most."""
    shared = ("--device", "cuda", "--model", model, "--setups", OURS, "--even-busy", "--label", model)
    limits = ("--keep-going", "--topic-seconds", f"{each:g}")
    return Part(name, (("-m", "benchmarks.run", *shared, *limits, *options),), seconds, tuple(topics.split()))


def pytest_part(name: str, *paths: tuple[str, ...], seconds: float) -> Part:
    """Without what cannot be imported here: the packages of developers need not be installed.

    What other packages warn of there is no fault.
    """
    options = ("-q", "-m", "gpu and not long", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    told = ("--tb=short", "-W", "default", "--disable-warnings", "-rfE")
    return Part(name, tuple(("-m", "pytest", *options, *told, *each) for each in paths), seconds)


# The first topic of a model also makes and verifies what is measured, and compiles for it.
PARTS = (
    pytest_part("tests-models", MODEL_TESTS, seconds=70),
    benchmark(
        "8b", "bench-8b", "generate ladder decode prefill memory batching speculation", seconds=340, each=120,
    ),
    pytest_part("tests-kernels", *KERNEL_TESTS, seconds=100),
    benchmark(
        "1b", "bench-1b", "generate decode prefill ladder batching speculation", "--setups",
        f"{OURS},hf_accel int4 deterministic", seconds=250, each=90,
    ),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(names)}; left out: all")
    parser.add_argument("--out", type=Path, help="folder for results and logs; left out: this GPU's, and build/gpu")
    arguments = parser.parse_args(argv)
    for name in arguments.parts:
        if name not in names:
            parser.error(f"part {name!r} is not known; choose some of {', '.join(names)}")
    if not torch.cuda.is_available():
        print(f"make gpu needs an NVIDIA GPU, and torch {torch.__version__} sees none here")
        return 1
    wanted = [part for part in PARTS if not arguments.parts or part.name in arguments.parts]
    return run(wanted, seconds=SECONDS, out=arguments.out)


def run(parts: Sequence[Part], *, seconds: float, out: Path | None = None) -> int:
    """Run the parts in order; returns 1 if one failed, was ended or was not begun."""
    deadline = time.monotonic() + seconds
    outcomes = []
    for part in parts:
        left = deadline - time.monotonic()
        print(f"== {part.name}", flush=True)
        start = time.monotonic()
        outcome = "there was no time left" if left < LEAST_SECONDS else run_part(part, min(part.seconds, left), out)
        outcomes.append((part.name, outcome, time.monotonic() - start))
        print(f"== {part.name}: {outcome or 'done'}", flush=True)
    for name, outcome, taken in outcomes:
        print(f"{name:16} {taken:6.1f} s  {outcome or 'done'}")
    return int(any(outcome for _, outcome, _ in outcomes))


def run_part(part: Part, seconds: float, out: Path | None = None) -> str | None:
    """Run a part for at most so many seconds; None if it succeeded, or what went wrong. Prints what came out."""
    if part.commands[0][:2] == ("-m", "pytest") and importlib.util.find_spec("pytest") is None:
        return "pytest is not installed"
    began, deadline = time.time(), time.monotonic() + seconds
    outcomes = run_processes(part, seconds, out)
    results = new_results(part, out or FOLDER, began)
    later = [topic for topic in part.topics if topic not in {result["topic"] for result in results}][1:]
    left = deadline - time.monotonic()
    if any(outcomes.values()) and later and left > AGAIN_SECONDS:
        print(f"once more for {', '.join(later)}", flush=True)
        outcomes |= run_processes(replace(part, name=f"{part.name}-again", topics=tuple(later)), left, out)
        results = new_results(part, out or FOLDER, began)
    for result in results:
        print("\n".join(digest(result)), flush=True)
    shown = {log: outcome for log, outcome in outcomes.items() if outcome is not None or not part.topics}
    for log, outcome in shown.items():
        end_of_log = log.read_text(encoding="utf-8", errors="replace")[-MOST_PRINTED // len(shown) :]
        print(f"-- {log}: {outcome or 'done'}\n{end_of_log.rstrip()}", flush=True)
    return "; ".join(dict.fromkeys(filter(None, outcomes.values()))) or None


def run_processes(part: Part, seconds: float, out: Path | None) -> dict[Path, str | None]:
    """Run the commands at the same time. By their logs: None of one that succeeded, or what went wrong."""
    where = () if out is None or not part.topics else ("--out", str(out))
    deadline, environment = time.monotonic() + seconds, {**os.environ, "PYTHONUNBUFFERED": "1"}
    processes: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for number, command in enumerate(part.commands):
            log = (out or LOGS) / f"{part.name}{f'-{number + 1}' if number else ''}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as file:
                # A session of its own, so that processes that the part has started end with it.
                processes[log] = subprocess.Popen(
                    [sys.executable, *command, *where, *part.topics],
                    start_new_session=True, stdout=file, stderr=subprocess.STDOUT, env=environment,
                )  # fmt: skip
        wait(processes.values(), deadline)
        late = [process for process in processes.values() if process.poll() is None]
        for process in late:
            os.killpg(process.pid, signal.SIGINT)
        wait(late, time.monotonic() + GRACE_SECONDS)
        ended = f"ended after {seconds:.0f} s, its limit"
        return {log: ended if process in late else failure(process) for log, process in processes.items()}
    finally:
        for process in processes.values():
            end(process)


def wait(processes: Iterable[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended, or until the deadline."""
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def failure(process: subprocess.Popen[bytes]) -> str | None:
    return None if process.returncode == 0 else f"it failed, exit status {process.returncode}"


def new_results(part: Part, folder: Path, since: float) -> list[dict[str, Any]]:
    """What the part has written since then, in the order of its topics. since: as time.time() has it."""
    label = part.commands[0][part.commands[0].index("--label") + 1] if part.topics else ""
    files = {path.stem: path for path in folder.rglob("*.json") if path.stat().st_mtime >= since}
    found = [files[stem] for topic in part.topics if (stem := file_stem(topic, label)) in files]
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


def digest(result: dict[str, Any]) -> Iterator[str]:
    """Of each table a title, and of each row its name and the first numbers."""
    for table in result["tables"]:
        name, *columns = list(table["rows"][0])
        columns = [column for column in columns if isinstance(table["rows"][0][column], float)][:COLUMNS]
        names = ", ".join(column.replace("_", " ") for column in columns)
        yield f"{result['topic']}: {table['title']} [{names}]"
        for row in table["rows"]:
            texts = [value for value in list(row.values())[1:] if isinstance(value, str)]
            words = [
                str(row[name]).removeprefix("hf_accel "),
                *texts,
                *(cell(column, row[column]) for column in columns),
            ]
            yield "  " + " ".join(words)
    for name, reason in result["refused"].items():
        if name.startswith("hf_accel"):
            yield f"{result['topic']}: {name} did not take part: {reason[:300]}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and of those that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
