"""Two workers against one on the same cores: actors of Ray Data, and processes of accelerate, by their examples.

Each system is started anew in each round, in turns, on the same prompts; all must write the same answers.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_accel.cli.measurement import WrongResultError, draw, take_turns
from hf_accel.patching.twin import twin

from ..harness.bench import Bench
from ..harness.models import load_model
from ..harness.processes import ProcessError
from ..harness.requests import median_ratio
from ..harness.settings import ScaleOut
from ..harness.tables import Row, Table
from ..harness.texts import SHIPPED
from .drafters import endless
from .http_load import save

EXAMPLES = SHIPPED.parent
RAY, ACCELERATE = "Ray Data", "accelerate"
NOTE = (
    "INT8, greedy, every answer of the same length; examples/ray_batch.py and examples/data_parallel.py. Ratio: rows "
    "per second to those of one worker of the same system, in the same round. Rows and tokens per second: from the "
    "first worker's start on its prompts to the last one's end. Whole seconds: of the command, with starts and loads. "
    "An actor of Ray answers {batch} rows together, a process of accelerate its whole share."
)


@dataclass(frozen=True)
class Work:
    """A checkpoint and prompts in a folder, and what is asked for."""

    folder: Path
    asked: ScaleOut

    @property
    def common(self) -> list[str]:
        return ["--model", str(self.folder / "model"), "--max-new-tokens", str(self.asked.new_tokens)]


@dataclass(frozen=True)
class Done:
    """What a command said, in seconds; texts: its answers, in the order of the prompts."""

    seconds: float
    whole_seconds: float
    tokens: int
    texts: list[str]


def measure(bench: Bench) -> list[Table]:
    asked = bench.settings.scale_out
    if importlib.util.find_spec("ray") is None:
        bench.refused[RAY] = "pip install 'hf_accel[ray]'"
    small = replace(asked, rows=asked.small_factor * asked.rows)
    tables = [table(bench, small, SHIPPED.name, load_model(str(SHIPPED)))]
    if Path(bench.settings.model).name != SHIPPED.name:
        tables.append(table(bench, asked, bench.description, twin(bench.model)))
    return tables


def table(bench: Bench, asked: ScaleOut, name: str, model: Any) -> Table:
    settings, cores = bench.settings, max(2, torch.get_num_threads())
    systems = {RAY: run_ray, ACCELERATE: run_accelerate}
    with tempfile.TemporaryDirectory(prefix="scale_out") as folder:
        work = Work(Path(folder), asked)
        save(endless(model), work.folder / "model")
        workload = draw(
            "fixed", requests=asked.rows, mean=asked.new_tokens, prompt_lengths=settings.serving.prompts,
            vocabulary=model.config.vocab_size, seed=settings.seed,
        )  # fmt: skip
        write_prompts(work, [" ".join(f"w{token}" for token in prompt) for prompt in workload.prompts])
        runs = {
            (system, workers): partial(run, work, workers, cores // workers)
            for system, run in systems.items()
            for workers in (1, 2)
            if system not in bench.refused
        }
        found = take_turns(runs, rounds=settings.rounds, warm_up=False)
    check([done for several in found.values() for done in several], asked)
    rows = [row(key, cores, found, asked.rows) for key in runs]
    title = f"{name}: {asked.rows} prompts, {asked.new_tokens} new tokens each, {cores} threads in all"
    return Table(title, rows, NOTE.format(batch=asked.batch))


def write_prompts(work: Work, prompts: Sequence[str]) -> None:
    """As JSON, and where Ray is installed as parquet."""
    (work.folder / "prompts.json").write_text(json.dumps(prompts))
    if importlib.util.find_spec("ray") is not None:
        import pyarrow
        from pyarrow import parquet

        rows = pyarrow.table({"id": range(len(prompts)), "prompt": prompts})
        parquet.write_table(rows, work.folder / "prompts.parquet")


def row(key: tuple[str, int], cores: int, found: dict[tuple[str, int], list[Done]], rows: int) -> Row:
    system, workers = key
    one, own = ([done.seconds for done in found[system, count]] for count in (1, workers))
    seconds = statistics.median(own)
    return {
        "system": system,
        "workers": workers,
        "threads_each": cores // workers,
        "ratio": median_ratio(one, own),
        "rows_per_second": rows / seconds,
        "tokens_per_second": found[key][0].tokens / seconds,
        "whole_seconds": statistics.median(done.whole_seconds for done in found[key]),
    }


def check(runs: Sequence[Done], asked: ScaleOut) -> None:
    """Raise WrongResultError unless all wrote the same answers, of the length that was asked for."""
    if any(done.tokens != asked.rows * asked.new_tokens for done in runs):
        raise WrongResultError(f"asked for {asked.rows * asked.new_tokens} tokens, got {[d.tokens for d in runs]}")
    if any(done.texts != runs[0].texts for done in runs):
        raise WrongResultError("the answers of two systems differ")


# -- systems -------------------------------------------------------------------------------------------


def run_ray(work: Work, workers: int, threads: int) -> Done:
    with tempfile.TemporaryDirectory(dir=work.folder) as out:
        command = ["ray_batch.py", str(work.folder / "prompts.parquet"), out, *work.common]
        command += ["--workers", str(workers), "--threads", str(threads), "--batch-size", str(work.asked.batch)]
        said = last_words([sys.executable, str(EXAMPLES / command[0]), *command[1:]])
        from pyarrow import parquet

        table = parquet.read_table(out, columns=["id", "text"]).sort_by("id")
        return Done(said["seconds"], said["whole_seconds"], said["tokens"], table["text"].to_pylist())


def run_accelerate(work: Work, workers: int, threads: int) -> Done:
    out = work.folder / "answers.json"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    command += [str(EXAMPLES / "data_parallel.py"), str(work.folder / "prompts.json"), *work.common]
    said = last_words([sys.executable, *command, "--threads", str(threads), "--out", str(out)])
    return Done(said["seconds"], said["whole_seconds"], said["tokens"], json.loads(out.read_text()))


def last_words(command: Sequence[str]) -> dict[str, Any]:
    """The JSON that a command prints last, and how long it took. Raises ProcessError if it fails."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ProcessError(f"{' '.join(command[1:])} stopped with {done.returncode}: {done.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "whole_seconds": time.perf_counter() - start}
