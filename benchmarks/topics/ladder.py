"""The ladder: from the naive way to generate, one measure after the other, each step timed.

On a GPU it has a step for the graphs, and none for float32, which a large model has no room for.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PreTrainedModel

from hf_accel.cli.measurement import take_turns, time_generate
from hf_accel.generation.graphs import SWITCH
from hf_accel.patching.twin import twin

from ..harness.bench import Bench, Entrant
from ..harness.models import reload
from ..harness.tables import Row, Table
from ..setups import accel, stock
from . import engine_ladder

Seconds = Callable[[], float]


def measure(bench: Bench) -> Iterator[Table]:
    found = steps_on_gpu if bench.settings.device == "cuda" else steps
    seconds = take_turns(dict(found(bench)), rounds=bench.settings.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    title = f"seconds per token, batch 1, context {bench.settings.context}"
    yield Table(title, rows(medians), note(bench))
    yield engine_ladder.measure(bench)


def steps(bench: Bench) -> Iterator[tuple[str, Seconds]]:
    """The name of each measure, with what runs it and all those before it."""
    yield "naive: float32, eager, no cache", partial(without_cache, bench, eager(reload_float32(bench)))
    yield "bfloat16", partial(without_cache, bench, eager(twin(bench.model)))
    plain = bench.entrant(stock.Stock())
    yield "KV cache", partial(with_cache, bench, Entrant(plain.setup, eager(twin(bench.model)), 0.0, {}))
    yield "flash attention (sdpa): stock", partial(with_cache, bench, plain)
    for setup in (accel.EXACT, accel.INT8, accel.INT4):
        yield setup.name, partial(with_cache, bench, bench.entrant(setup))


def steps_on_gpu(bench: Bench) -> Iterator[tuple[str, Seconds]]:
    """As `steps`. Attention over pages and fused layers run without graphs first."""
    yield "naive: eager, no cache", partial(without_cache, bench, eager(twin(bench.model)))
    plain = bench.entrant(stock.Stock())
    yield "KV cache", partial(with_cache, bench, Entrant(plain.setup, eager(twin(bench.model)), 0.0, {}))
    yield "flash attention (sdpa): stock", partial(with_cache, bench, plain)
    not_fused, exact = map(bench.entrant, (accel.NOT_FUSED, accel.EXACT))
    yield "hf_accel: attention over pages", partial(without_graphs, partial(with_cache, bench, not_fused))
    yield "fused layers", partial(without_graphs, partial(with_cache, bench, exact))
    yield f"CUDA graphs: {exact.setup.name}", partial(with_cache, bench, exact)
    for setup in (accel.INT8, accel.INT4):
        yield setup.name, partial(with_cache, bench, bench.entrant(setup))


def without_graphs(run: Seconds) -> float:
    with environment(SWITCH, "0"):
        return run()


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def reload_float32(bench: Bench) -> PreTrainedModel:
    print("  making the float32 model ...", flush=True)
    return reload(bench.model, dtype=torch.float32)


def eager(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


def without_cache(bench: Bench, model: PreTrainedModel) -> float:
    prompt = bench.tokens(batch=1, length=bench.settings.context)
    num_new = bench.settings.naive_tokens
    return time_generate(model, prompt, num_new=num_new, use_cache=False).total / num_new


def with_cache(bench: Bench, entrant: Entrant) -> float:
    context = bench.settings.context
    cache = bench.filled_cache(entrant, batch=1, tokens=context)
    prompt = bench.tokens(batch=1, length=context + 1)
    return time_generate(entrant.model, prompt, num_new=bench.settings.batch_tokens, past_key_values=cache).per_step


def rows(seconds: dict[str, float]) -> list[Row]:
    """factor_ratio: to the step above; product: of all factors so far."""
    values = list(seconds.values())
    return [
        {"measure": name, "factor_ratio": above / value, "product": values[0] / value, "token_seconds": value}
        for (name, value), above in zip(seconds.items(), [values[0], *values], strict=False)
    ]


def note(bench: Bench) -> str:
    return (
        f"Without a cache every token costs a pass over all {bench.settings.context} before it, so only "
        f"{bench.settings.naive_tokens} token(s) were timed there, and {bench.settings.batch_tokens} elsewhere. "
        "int8 and int4 are alternatives: the last factor is int4 over int8."
    )
