"""What estimate() says of this machine, whose speeds it measures itself, and what was then measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import hf_accel
from hf_accel.estimate.result import Counted
from hf_accel.estimate.roofline import Machine, Work
from hf_accel.estimate.workload import Workload
from hf_accel.measuring.turns import BASELINE

from . import decode, generate, prefill
from .bench import Bench
from .setups import accel
from .tables import Row, Table

WEIGHTS = {accel.EXACT.name: None, accel.INT8.name: "int8", accel.INT4.name: "int4"}
NOTE = (
    "Estimated: by estimate() with the speeds that it measures before, memory being read and numbers multiplied one "
    "after the other; at least: as if the shorter hid behind the longer. Error: of the estimated seconds."
)


def measure(bench: Bench) -> list[Table]:
    context, new = bench.settings.context, bench.settings.new_tokens
    entrants = {name: entrant for name, entrant in bench.entrants.items() if name in (BASELINE, *WEIGHTS)}
    counts = {name: counted(bench, name) for name in entrants if name != BASELINE}
    print(f"    the machine's speeds: {next(iter(counts.values())).machine}", flush=True)

    def rows(what: str, table: Table, column: str, work: Callable[[Workload], Work]) -> list[Row]:
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
    errors = [abs(each["error"]) for each in found]
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


def a_step(workload: Workload, *, context: int, batch: int) -> Work:
    return workload.at(context=context, batch=batch).decode


def a_prompt(workload: Workload, *, context: int) -> Work:
    return workload.at(context=context, batch=1).prefill


def a_generate(workload: Workload, *, context: int, new: int) -> Work:
    step = a_step(workload, context=context + new // 2, batch=1)
    return Work(
        *(once + (new - 1) * each for once, each in zip(a_prompt(workload, context=context), step, strict=True))
    )


def row(what: str, name: str, work: Work, *, machine: Machine, measured: float) -> Row:
    estimated = machine.seconds_in_turn(work)
    return {
        "work": what,
        "setup": name,
        "at_least_seconds": machine.seconds(work),
        "estimated_seconds": estimated,
        "measured_seconds": measured,
        "error": estimated / measured - 1,
    }
