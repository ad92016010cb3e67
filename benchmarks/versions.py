"""This tree against the work tree of another commit: decoding, long contexts, batches and arrivals, in turns.

python -m benchmarks.versions PATH     PATH: a work tree of that commit, with its kernels compiled

Each tree has a process of its own that stays, and only one of them works at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .harness.machine import machine, versions
from .harness.quiet import wait_until_quiet
from .harness.results_folder import machine_folder, write
from .harness.tables import Row, Table
from .structure import HERE, commit_of

TOPIC = "versions"
WORKER = Path(__file__).parent / "harness" / "versions_run.py"
WORKLOADS = [
    *(
        f"decode {size} {weights} {rows}"
        for size in ("small", "large")
        for weights in ("exact", "int8")
        for rows in (1, 8)
    ),
    *(f"{kind} {size}" for kind in ("long_decode", "batching", "latency") for size in ("small", "large")),
]
RESAMPLES = 2000
NOTE = (
    "Ratio: seconds of {before} over those of this tree, above 1 is faster now; geometric mean of {rounds} rounds, "
    "each of both trees, and its 95 % interval by resampling them. Small and large: Llamas in bfloat16, 4 layers of "
    "width 256 and 8 of 2048, random weights."
)


class Tree:
    """A process that runs workloads with the hf_accel of one work tree."""

    def __init__(self, path: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], cwd=path, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, workload: str) -> dict[str, float]:
        """Seconds by what was timed. Raises RuntimeError if the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{workload}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{workload!r} failed in {self.process.args!r}; its last words are above")
        seconds: dict[str, float] = json.loads(answer)
        return seconds

    def close(self) -> None:
        assert self.process.stdin is not None
        with self.process:  # which waits for it
            self.process.stdin.close()


def compare(before: Tree, now: Tree, workload: str, *, rounds: int) -> list[Row]:
    """A row for each number that the workload gives."""
    print(f"  {workload}", flush=True)
    pairs = []
    for number in range(rounds + 1):
        trees = (before, now) if number % 2 else (now, before)  # neither always comes first
        found = {tree: tree.run(workload) for tree in trees}
        if number:  # round 0 warms up
            pairs.append((found[before], found[now]))
    rows: list[Row] = []
    for name in pairs[0][0]:
        logs = [math.log(old[name] / new[name]) for old, new in pairs]
        low, high = interval(logs)
        rows.append(
            {
                "workload": f"{workload}, {name}",
                "before_seconds": statistics.median(old[name] for old, _ in pairs),
                "now_seconds": statistics.median(new[name] for _, new in pairs),
                "ratio": math.exp(statistics.fmean(logs)),
                "low_ratio": math.exp(low),
                "high_ratio": math.exp(high),
            }
        )
    return rows


def interval(logs: Sequence[float]) -> tuple[float, float]:
    """95 % of the means of the values drawn again with replacement."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, help="work tree of another commit, with its kernels compiled")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=WORKLOADS, metavar="WORKLOAD")
    parser.add_argument("--even-busy", action="store_true", help="though other processes take the machine's time")
    parser.add_argument("--out", type=Path, help="folder of the results; left out: this CPU's")
    arguments = parser.parse_args(argv)
    busy = wait_until_quiet(even_busy=arguments.even_busy)
    before, now = Tree(arguments.tree.resolve()), Tree(HERE)
    try:
        rows = [row for workload in arguments.only for row in compare(before, now, workload, rounds=arguments.rounds)]
    finally:
        before.close()
        now.close()
    title = f"This tree against {commit_of(arguments.tree)}"
    table = Table(title, rows, NOTE.format(before=commit_of(arguments.tree), rounds=arguments.rounds))
    print(table.markdown())
    result = {
        "topic": TOPIC,
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.versions WORK_TREE_OF_{commit_of(arguments.tree)}",
        "model": "random Llamas",
        "settings": {"rounds": arguments.rounds},
        "machine": machine() | {"busy_cores": busy},
        "versions": versions(),
        "verified": [],
        "refused": {},
        "tables": [asdict(table)],
    }
    print(f"written to {write(arguments.out or machine_folder(result['machine']), result)}")


if __name__ == "__main__":
    main()
