"""Decode on a CPU with older instructions: ours and torch's held back alike, each level in a process of its own."""

from __future__ import annotations

import statistics
from typing import Any

from hf_accel.cli.measurement import BASELINE
from hf_accel.hardware import detect, possible_levels
from hf_accel.kernels import cpu as kernels

from ..harness.bench import Bench
from ..harness.processes import call
from ..harness.requests import median_ratio, spread_share
from ..harness.tables import Row, Table

# What holds torch back at each level: its own kernels, oneDNN's and MKL's.
HELD_BACK = {
    "avx_vnni": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
FLOAT32 = "stock float32"
NOTE = (
    "HF_ACCEL_ISA, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS and ATEN_CPU_CAPABILITY hold both sides back alike. "
    "Without instructions for bfloat16, float32 may be the faster stock: best ratio is against the faster. Share: of "
    "the read bandwidth that torch has at that level."
)


def measure(bench: Bench) -> list[Table]:
    return [table(bench, level) for level in levels()]


def levels() -> list[str]:
    """Those that this CPU can be held back to; none without kernels to hold back."""
    if kernels.refusal() is not None:
        return []
    possible = possible_levels(frozenset(detect().instruction_sets))
    return [level for level in HELD_BACK if level in possible]


def table(bench: Bench, level: str) -> Table:
    settings = bench.settings
    print(f"    {level} in a new process", flush=True)
    environment = {"HF_ACCEL_ISA": level, **HELD_BACK[level]}
    arguments = (settings.model, settings.layers or 0, settings.context, settings.rounds)
    found = call("isa_step", *arguments, environment=environment)
    rows = [row(name, found) for name in found["seconds"]]
    return Table(f"decode step, batch 1, context {settings.context}, {level} only", rows, NOTE)


def row(name: str, found: dict[str, Any]) -> Row:
    seconds = found["seconds"]
    median = statistics.median(seconds[name])
    return {
        "setup": name,
        "ratio": median_ratio(seconds[BASELINE], seconds[name]),
        "best_ratio": min(median_ratio(seconds[stock], seconds[name]) for stock in (BASELINE, FLOAT32)),
        "step_seconds": median,
        "spread_share": spread_share(seconds[name]),
        "tokens_per_second": 1 / median,
        "bandwidth_share": found["bytes"][name] / median / found["bandwidth"],
    }
