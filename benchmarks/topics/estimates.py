"""What estimate() says of this machine, whose speeds it measures itself, and what was then measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import hf_accel
from hf_accel.cli.measurement import BASELINE
from hf_accel.estimate.result import Counted
from hf_accel.estimate.roofline import Machine, Work
from hf_accel.estimate.workload import Workload

from ..harness.bench import Bench
from ..harness.tables import Row, Table
from ..setups import accel
from . import decode, generate, prefill

WEIGHTS = {accel.EXACT.name: None, accel.INT8.name: "int8", accel.INT4.name: "int4"}
NOTE = (
    "Estimated: by estimate() with the speeds that it measures before; at least: as if, of reading memory and "
    "multiplying, the shorter hid behind the longer. Error: of the estimated seconds."
)
Passes = list[tuple[int, Work]]  # of the model, and how many times each


def measure(bench: Bench) -> list[Table]:
    context, new = bench.settings.context, bench.settings.new_tokens
    wanted = [setup for setup in bench.setups if setup.name in (BASELINE, *WEIGHTS)]
    entrants = {setup.name: bench.entrant(setup) for setup in wanted}
    counts = {name: counted(bench, name) for name in entrants if name != BASELINE}
    for name, one in counts.items():
        print(f"    {name}: {one.machine}", flush=True)

    def rows(what: str, table: Table, column: str, work: Callable[[Workload], Passes]) -> list[Row]:
        measured = {found["setup"]: found[column] for found in table.rows}
        return [
            row(what, name, work(one.workload), machine=one.machine, measured=measured[name])
            for name, one in counts.items()
        ]

    found: list[Row] = []
    for batch in bench.settings.batches:
        table = decode.step_table(bench, entrants, batch=batch, context=context)
        found += rows(f"decode, batch {batch}", table, "step_seconds", partial(a_step, context=context, batch=batch))
    prompt, whole = prefill.table(bench, entrants), generate.table(bench, entrants)
    found += rows(f"prompt of {context}", prompt, "prefill_seconds", partial(a_prompt, context=context))
    found += rows(f"generate {new}", whole, "generate_seconds", partial(a_generate, context=context, new=new))
    errors = [abs(each["error_share"]) for each in found]
    note = f"{NOTE} The median error is {statistics.median(errors):.0%}, the largest {max(errors):.0%}."
    return [Table(f"seconds by estimate() and measured, {bench.description}", found, note)]


def counted(bench: Bench, name: str) -> Counted:
    """The work of one sequence, and the speeds of this machine."""
    longest = bench.settings.context + bench.settings.new_tokens
    found = hf_accel.estimate(
        bench.model.config,
        context=longest,
        weights=WEIGHTS[name],
        dtype=bench.model.dtype,
        device=bench.settings.device,
    )
    return found.counted


def a_step(workload: Workload, *, context: int, batch: int, times: int = 1) -> Passes:
    return [(times, workload.at(context=context, batch=batch).decode)]


def a_prompt(workload: Workload, *, context: int) -> Passes:
    return [(1, workload.at(context=context, batch=1).prefill)]


def a_generate(workload: Workload, *, context: int, new: int) -> Passes:
    steps = a_step(workload, context=context + new // 2, batch=1, times=new - 1)
    return a_prompt(workload, context=context) + steps


def row(what: str, name: str, passes: Passes, *, machine: Machine, measured: float) -> Row:
    estimated = sum(times * machine.seconds(work) for times, work in passes)
    at_least = (times * max(machine.reading(work), machine.computing(work)) for times, work in passes)
    return {
        "work": what,
        "setup": name,
        "at_least_seconds": sum(at_least),
        "estimated_seconds": estimated,
        "measured_seconds": measured,
        "error_share": estimated / measured - 1,
    }
