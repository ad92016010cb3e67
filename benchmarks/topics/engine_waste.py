"""Block waste of the engine's own scheduler: a simulation without a model, prompts and preemptions included."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hf_accel.cache.group import PageGroup
from hf_accel.cache.pages import Pages
from hf_accel.generation.sampling.sampling import Sampling
from hf_accel.generation.scheduling.scheduler import Scheduler
from hf_accel.generation.sequence import Sequence

from ..harness.settings import Settings

BUDGET = 256  # tokens of a pass, the Engine's default


def engine_waste(settings: Settings, lengths: Iterator[int], *, block_size: int, running: int) -> tuple[float, int]:
    """Empty slots over held slots, both summed over all passes; and the passes.

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
        yield Sequence([0] * prompt, max(1, length - prompt), sampling=Sampling())


def run_pass(scheduler: Scheduler) -> None:
    """What the Batcher does around a pass of the model: each chunk that reaches its sequence's end brings a token."""
    for chunk in scheduler.schedule():
        sequence, ends = chunk.sequence, chunk.reaches_end
        sequence.num_computed += chunk.count
        if ends:
            sequence.tokens.append(0)
        if sequence.num_left == 0:
            scheduler.remove(sequence, "length")
