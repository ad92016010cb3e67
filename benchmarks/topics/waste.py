"""Waste: the share of KV slots that are held and empty, while requests of random lengths come and go.

A simulation with the engine's own scheduler and without a model, prompts and preemptions included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from hf_accel.cache.group import PageGroup
from hf_accel.cache.pages import Pages
from hf_accel.generation.request_settings import RequestSettings
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.scheduling.scheduler import Scheduler
from hf_accel.generation.sequence import Sequence

from ..harness.bench import Bench
from ..harness.settings import Settings
from ..harness.tables import Table

BUDGET = 256  # tokens of a pass, the Engine's default
CONCURRENT = 32


def measure(bench: Bench) -> list[Table]:
    settings, simulated = bench.settings, bench.settings.waste
    layouts = {"blocks of 16": 16, "blocks of 256": 256, "the maximum reserved": simulated.max_length}
    wastes = {
        name: waste(settings, lengths(settings), block_size=block_size, running=CONCURRENT)
        for name, block_size in layouts.items()
    }
    full, _ = wastes["the maximum reserved"]
    rows = [
        {"layout": name, "ratio": (1 - share) / (1 - full), "waste_share": share, "passes": passes}
        for name, (share, passes) in wastes.items()
    ]
    title = f"KV waste, {simulated.requests} requests, lengths exponential with mean {simulated.mean_length}"
    note = (
        f"At most {simulated.max_length} tokens each, of which a random part is prompt, computed in chunks; at most "
        f"{CONCURRENT} requests and {BUDGET} tokens a pass. No model: waste is a matter of bookkeeping. Ratio: "
        "sequences that the same memory holds, against reserving the maximum."
    )
    return [Table(title, rows, note)]


def lengths(settings: Settings) -> Iterator[int]:
    generator = random.Random(settings.seed)
    for _ in range(settings.waste.requests):
        yield min(settings.waste.max_length, max(1, round(generator.expovariate(1 / settings.waste.mean_length))))


def waste(settings: Settings, lengths: Iterator[int], *, block_size: int, running: int) -> tuple[float, int]:
    """Return empty slots over held slots, both summed over all passes; and the number of passes.

    lengths: of prompt and output together; half of each request, on average, is prompt.
    """
    group = PageGroup(
        window=None, num_blocks=running, block_size=block_size, growable=True, prefix_sharing=False, quantized=None
    )
    scheduler = Scheduler(Pages([group]), token_budget=BUDGET, max_running=running)
    for sequence in requests(lengths, settings.seed):
        scheduler.add(sequence)
    held = filled = passes = 0
    while scheduler.has_work:
        run_pass(scheduler)
        held += group.pool.num_used * block_size
        filled += sum(sequence.num_computed for sequence in scheduler.running)
        passes += 1
    return 1 - filled / held, passes


def requests(lengths: Iterator[int], seed: int) -> Iterator[Sequence]:
    generator = random.Random(seed)
    for length in lengths:
        prompt = 1 + int(generator.random() * max(1, length - 1))
        yield Sequence([0] * prompt, RequestSettings(max(1, length - prompt), Sampling()))


def run_pass(scheduler: Scheduler) -> None:
    """Do what the Batcher does around a pass: each chunk that reaches its sequence's end brings a token."""
    for chunk in scheduler.schedule():
        sequence, ends = chunk.sequence, chunk.reaches_end
        sequence.num_computed += chunk.count
        if ends:
            sequence.tokens.append(0)
        if sequence.num_left == 0:
            scheduler.remove(sequence, "length")
