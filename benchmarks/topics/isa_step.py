"""Seconds of decode steps at batch 1 with whatever instructions the environment allows.

python -m benchmarks.topics.isa_step NAME LAYERS CONTEXT ROUNDS, with 0 for all layers
"""

from __future__ import annotations

import contextlib
import json
import sys
from functools import partial

import torch

from hf_accel.cli.measurement import BASELINE, take_turns

from ..harness.bench import Bench, Entrant
from ..harness.machine import require_kernels
from ..harness.models import reload
from ..harness.settings import Settings
from ..setups import accel, stock
from .decode import kv_bytes, run_one
from .isa import FLOAT32

TOKENS = 4  # bfloat16 without its instructions can take seconds each


def main(name: str, layers: str, context: str, rounds: str) -> None:
    settings = Settings(model=name, layers=int(layers) or None, context=int(context), batch_tokens=TOKENS)
    require_kernels()  # a level that was not compiled would leave torch's fallback under its name
    with contextlib.redirect_stdout(sys.stderr):  # the last line that is printed is the result
        result = measure(Bench(settings), rounds=int(rounds))
    print(json.dumps(result))


def measure(bench: Bench, *, rounds: int) -> dict[str, object]:
    plain = bench.entrant(stock.Stock())
    wide = Entrant(plain.setup, reload(bench.model, dtype=torch.float32), 0.0, {})
    entrants = {BASELINE: plain, FLOAT32: wide}
    entrants |= {setup.name: bench.entrant(setup) for setup in (accel.EXACT, accel.INT8, accel.INT4)}
    context = bench.settings.context
    candidates = {n: partial(run_one, bench, e, batch=1, context=context) for n, e in entrants.items()}
    runs = take_turns(candidates, rounds=rounds, warm_up=False)
    return {
        "seconds": {name: [run.per_step for run in results] for name, results in runs.items()},
        "bytes": {
            name: entrant.setup.read_bytes(entrant.model) + kv_bytes(bench, entrant, batch=1, context=context)
            for name, entrant in entrants.items()
        },
        "bandwidth": bench.bandwidth,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
