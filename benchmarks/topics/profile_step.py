"""Where the time of a decode step goes: every module's own time, and what generate() takes around the model.

python -m benchmarks.run profile
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_accel.cache.hf.ragged import RaggedLayer
from hf_accel.cli.measurement import time_generate
from hf_accel.fused import layer_programme
from hf_accel.fused.hf.layer_calls import TracedForward

from ..harness.bench import Bench, Entrant
from ..harness.tables import Row, Table
from ..setups import accel, stock

OUTSIDE = "generate() around the model"
WHOLE, AROUND = "layers, one native call each", "layers: around their call"
NOTE = (
    "Own time of each kind of module, those inside it subtracted; a fused block counts where it is called, and layers "
    "of one native call are not looked into. Wrapping them costs about a microsecond a call; plain: the step without "
    "wrappers, timed beside it."
)


class SelfTimes:
    """Seconds spent in each part and in none of the parts called from it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inner, seconds, clock = self._inner, self.seconds, time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent = clock() - start
                seconds[part] += spent - inner.pop()
                inner[-1] += spent

        return timed


def part_of(name: str, module: nn.Module, model: nn.Module) -> str | None:
    """The row that a module's own time is counted in."""
    if isinstance(module, TracedForward):
        return AROUND
    if isinstance(module, nn.Linear):
        return "linear: head" if name == "lm_head" else "linear: layers"
    kind = type(module).__name__.lower()
    for word, part in PARTS.items():
        if word in kind or name.endswith(f".{word}"):
            return part
    return "model: masks, positions" if module is model else None


PARTS = {
    "norm": "norms",
    "rotary": "rotary embedding, once",
    "self_attn": "self_attn: rope, reshaping",
    "mlp": "mlp without linears, if not fused",
    "decoderlayer": "layer: residuals",
}


@contextmanager
def measured(entrant: Entrant, cache: Any, times: SelfTimes) -> Iterator[None]:
    """Every part of the model, its attention function and the cache wrapped, and unwrapped in the end."""
    model: Any = entrant.model
    before: list[tuple[Any, str, Any]] = []
    owners: list[tuple[Any, str, str]] = [(cache, "update", "cache: update")]
    layers = [layer for layer in model.modules() if isinstance(layer, TracedForward)]
    whole = {id(m) for layer in layers for m in layer.modules() if m is not layer}
    modules = [(name, m) for name, m in model.named_modules() if id(m) not in whole]
    owners += [(m, "forward", part) for name, m in modules if (part := part_of(name, m, model))]
    attention = model.config._attn_implementation
    function, update, call = ALL_ATTENTION_FUNCTIONS[attention], RaggedLayer.update, layer_programme.run_layer
    try:
        for owner, method, part in owners:
            before.append((owner, method, vars(owner).get(method)))
            object.__setattr__(owner, method, times.wrap(part, getattr(owner, method)))
        ALL_ATTENTION_FUNCTIONS[attention] = times.wrap("attention", function)
        RaggedLayer.update = times.wrap("cache: update", update)  # type: ignore[method-assign]
        layer_programme.run_layer = times.wrap(WHOLE, call)
        yield
    finally:
        # The registered one, which ours has only hidden, is found again; ours may not be there yet.
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop(attention, None)
        RaggedLayer.update = update  # type: ignore[method-assign]
        layer_programme.run_layer = call
        for owner, method, own in before:
            if own is None:
                object.__delattr__(owner, method)
            else:
                object.__setattr__(owner, method, own)


def measure(bench: Bench) -> list[Table]:
    wanted = [setup.name for setup in bench.setups]
    setups = [s for s in (stock.Stock(), accel.EXACT, accel.INT8, accel.INT4) if s.name in wanted]
    return [table(bench, bench.entrant(setup)) for setup in setups]


def table(bench: Bench, entrant: Entrant) -> Table:
    print(f"  {entrant.setup.name}", flush=True)
    plain = statistics.median(run(bench, entrant) for _ in range(bench.settings.rounds))
    rounds = []
    for _ in range(bench.settings.rounds):
        times = SelfTimes()
        step = run(bench, entrant, times)
        rounds.append({**times.seconds, OUTSIDE: step - sum(times.seconds.values())})
    medians = {part: statistics.median(r[part] for r in rounds) for part in rounds[0]}
    title = f"where a decode step of {entrant.setup.name} goes, batch 1, context {bench.settings.context}"
    return Table(title, rows(medians, plain), NOTE)


def rows(medians: dict[str, float], plain: float) -> list[Row]:
    total = sum(medians.values())
    ordered = sorted(medians.items(), key=lambda item: -item[1])
    ordered += [("all, wrapped", total), ("all, plain", plain)]
    return [{"part": part, "step_seconds": seconds, "step_share": seconds / total} for part, seconds in ordered]


def run(bench: Bench, entrant: Entrant, times: SelfTimes | None = None) -> float:
    """Seconds of a step, in `times` those of its parts; without the first step, which sets generate() up."""
    context, num_new = bench.settings.context, bench.settings.batch_tokens
    cache = bench.filled_cache(entrant, batch=1, tokens=context)
    prompt = bench.tokens(batch=1, length=context + 1)
    if times is None:
        return time_generate(entrant.model, prompt, num_new=num_new, past_key_values=cache).per_step
    with measured(entrant, cache, times):
        generation = time_generate(
            entrant.model, prompt, num_new=num_new, past_key_values=cache, after_first=times.seconds.clear
        )
    for part in times.seconds:
        times.seconds[part] /= num_new - 1
    return generation.per_step
