"""Models that keep other states than keys and values, or read more than text: stock and ours in turns."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_accel import UnsupportedError
from hf_accel.cli.measurement import BASELINE, WrongResultError, ratios, take_turns, time_generate
from hf_accel.patching.twin import twin

from ..harness.bench import Bench, Entrant
from ..harness.checks import PROMPT_TOKENS
from ..harness.kind_shapes import MORE, TEXT, Inputs, InputShape, TextShape, random_of
from ..harness.models import tensor_bytes
from ..harness.tables import Row, Table
from ..setups import Setup, accel, llama_cpp, stock

OURS = (accel.EXACT, accel.INT8, accel.INT4)
PEERS = llama_cpp.SETUPS
BATCHES = (1, 8, 16)
SHORT = 64  # tokens before the steps of a batch, whose cost hardly depends on them: states have a fixed size
REQUESTS = 16
NOTE = (
    "Ratio: seconds of stock over those of a setup in the same round, the median of the rounds; least and most: of "
    "the rounds. Share of the measured read bandwidth that the weights of a step come to; of experts, as many as its "
    "tokens choose on average. A prompt that takes a minute or more is computed without peers and without a warm-up."
)
MORE_NOTE = "Ratio: as above, of a generate() for all requests together, with what reads their inputs."
Run = Callable[[Entrant], float]
Found = Mapping[str, Sequence[float]]


def measure(bench: Bench) -> Iterator[Table]:
    """A table for each shape; a quick run takes the first of each sort."""
    quick = bench.settings.quick
    texts, others = (list(shapes)[:1] if quick else list(shapes) for shapes in (TEXT, MORE))
    for name in others:  # first, since a long prompt may take the rest of the time that a run has
        yield more_table(bench, name, MORE[name])
    for name in texts:
        yield text_table(bench, name, TEXT[name])


# -- text ----------------------------------------------------------------------------------------------


def text_table(bench: Bench, name: str, shape: TextShape) -> Table:
    gc.collect()  # the models before: they point to themselves
    own = Bench(replace(bench.settings, model=name))
    own.model, own.bandwidth = random_of(shape, seed=own.settings.seed, dtype=torch.bfloat16), bench.bandwidth
    prompt = own.tokens(batch=1, length=PROMPT_TOKENS)
    peers = () if own.settings.quick else PEERS
    entrants = entrants_of(own.model, {"input_ids": prompt}, *peers)
    rows: list[Row] = []
    for work, run, batch in works(own):
        print(f"  {name}: {work}", flush=True)
        found = timed(own, entrants, run)
        rows += [text_row(own, entrants[each], found, work=work, batch=batch) for each in found]
    if shape.context and not own.settings.quick:
        rows += long_rows(own, {n: each for n, each in entrants.items() if not each.setup.is_peer}, shape.context)
    return Table(name, rows, NOTE)


def works(bench: Bench) -> list[tuple[str, Run, int | None]]:
    """What is timed, and the batch of a decode step; None for a prompt."""
    found: list[tuple[str, Run, int | None]] = [
        (f"decode, batch {batch}", partial(step_seconds, bench, batch), batch) for batch in BATCHES
    ]
    context = bench.settings.context
    return [*found, (f"prompt of {context}", partial(prompt_seconds, bench, context), None)]


def step_seconds(bench: Bench, batch: int, entrant: Entrant) -> float:
    prompt = bench.tokens(batch=batch, length=SHORT)
    return time_generate(entrant.model, prompt, num_new=bench.settings.batch_tokens).per_step


def prompt_seconds(bench: Bench, tokens: int, entrant: Entrant) -> float:
    return time_generate(entrant.model, bench.tokens(batch=1, length=tokens), num_new=1).total


def long_rows(bench: Bench, entrants: Mapping[str, Entrant], context: int) -> list[Row]:
    """The steps after a long prompt, and the prompt itself: one generate() times both."""
    print(f"  {context} tokens", flush=True)
    prompt, new = bench.tokens(batch=1, length=context), bench.settings.batch_tokens
    candidates = {n: partial(time_generate, each.model, prompt, num_new=new) for n, each in entrants.items()}
    found = take_turns(candidates, rounds=bench.settings.rounds, warm_up=False, report=lambda _: None)
    steps = {name: [each.per_step for each in runs] for name, runs in found.items()}
    prompts = {name: [each.first_token for each in runs] for name, runs in found.items()}
    rows = [text_row(bench, each, steps, work=f"decode after {context}", batch=1) for each in entrants.values()]
    return rows + [
        text_row(bench, each, prompts, work=f"prompt of {context}", batch=None) for each in entrants.values()
    ]


def timed(bench: Bench, entrants: Mapping[str, Entrant], run: Run) -> dict[str, list[float]]:
    candidates = {name: partial(run, entrant) for name, entrant in entrants.items()}
    return take_turns(candidates, rounds=bench.settings.rounds, report=lambda _: None)


def text_row(bench: Bench, entrant: Entrant, found: Found, *, work: str, batch: int | None) -> Row:
    row = row_of(entrant.setup.name, found, work)
    share = None
    if batch is not None:
        read = step_bytes(entrant, batch)
        share = read and read / statistics.median(found[entrant.setup.name]) / bench.bandwidth
    return {**row, "bandwidth_share": share}


def row_of(name: str, found: Found, work: str) -> Row:
    each = ratios(found[BASELINE], found[name])
    row = {
        "work": work, "setup": name, "ratio": statistics.median(each), "least_ratio": min(each),
        "most_ratio": max(each), "median_seconds": statistics.median(found[name]),
    }  # fmt: skip
    print(f"    {name}: {row['ratio']:.2f} ({row['least_ratio']:.2f} to {row['most_ratio']:.2f})", flush=True)
    return row


def step_bytes(entrant: Entrant, batch: int) -> float | None:
    """Bytes of weights that a decode step of so many tokens reads on average; None for experts in a peer's file."""
    model = entrant.model
    config: Any = model.config
    count, chosen = getattr(config, "n_routed_experts", None), getattr(config, "num_experts_per_tok", None)
    whole = entrant.setup.read_bytes(model)
    if not count or not chosen:
        return whole
    if entrant.setup.is_peer:
        return None
    tensors = {id(t): t for name, t in model.state_dict(keep_vars=True).items() if ".experts." in name}
    experts = sum(tensor_bytes(t) for t in tensors.values() if isinstance(t, Tensor))
    return whole - experts * (1 - chosen / count) ** batch


# -- more than text ------------------------------------------------------------------------------------


def more_table(bench: Bench, name: str, shape: InputShape) -> Table:
    gc.collect()
    model = random_of(shape, seed=bench.settings.seed, dtype=torch.float32)
    inputs = shape.inputs(model.config, REQUESTS)
    few = {name: tensor[:2] for name, tensor in inputs.items()}
    if model.config.is_encoder_decoder:
        few["decoder_input_ids"] = torch.tensor([[2, 5, 7], [2, 9, 4]])
    entrants = entrants_of(model, few)
    print(f"  {name}", flush=True)
    found = timed(bench, entrants, partial(request_seconds, shape, inputs))
    work = f"{REQUESTS} requests" + (f", {shape.beams} beams" if shape.beams > 1 else "")
    return Table(name, [row_of(each, found, work) for each in found], MORE_NOTE)


def request_seconds(shape: InputShape, inputs: Inputs, entrant: Entrant) -> float:
    start = time.perf_counter()
    generated(shape, inputs, entrant.model)
    return time.perf_counter() - start


def generated(shape: InputShape, inputs: Inputs, model: Any) -> Tensor:
    length = {"max_new_tokens": shape.new_tokens, "min_new_tokens": shape.new_tokens}
    out: Tensor = model.generate(**inputs, **length, do_sample=False, num_beams=shape.beams)
    return out


# -- what takes part -----------------------------------------------------------------------------------


def entrants_of(model: PreTrainedModel, inputs: Inputs, *peers: Setup) -> dict[str, Entrant]:
    """Prepare and check all that take part; of the peers those that can run such a model, and of ours those that can.

    Raises WrongResultError if the logits of one are farther from those of float32 than its tolerance and, since random
    weights spread rounding, than twice the distance of stock's.
    """
    found = {BASELINE: Entrant(stock.Stock(), model, 0.0, {})}
    expected = logits_of(copy.deepcopy(model).float(), inputs)
    own = distance(logits_of(model, inputs), expected)
    for setup in (*OURS, *(peer for peer in peers if peer.refuses(model.config) is None)):
        try:
            ours: Any = setup.prepare(twin(model))
        except UnsupportedError as error:  # the groups of 4 bits do not divide each width
            print(f"  without {setup.name}: {error}", flush=True)
            continue
        error = distance(logits_of(ours, inputs), expected)
        if not error <= setup.tolerance + 2 * own:
            raise WrongResultError(f"{setup.name}: logits differ from float32 by {error:.3f} of their norm")
        found[setup.name] = Entrant(setup, ours, 0.0, {"setup": setup.name, "logits_error": error})
    return found


@torch.no_grad()
def logits_of(model: Any, inputs: Inputs) -> Tensor:
    floats = {n: x.to(model.dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    logits: Tensor = model(**floats).logits
    return logits.float()


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())
