"""Waste: the share of KV slots that are held and empty, while requests of random lengths come and go."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

from hf_accel.cache.pool import BlockPool, BlockTable

from ..harness.bench import Bench
from ..harness.settings import Settings
from ..harness.tables import Table
from .engine_waste import BUDGET, engine_waste

CONCURRENT = 32
Sequence = tuple[BlockTable, int]  # and how long it will get


def measure(bench: Bench) -> list[Table]:
    settings, simulated = bench.settings, bench.settings.waste
    layouts = {"blocks of 16": 16, "blocks of 256": 256, "the maximum reserved": simulated.max_length}
    wastes = {name: waste(settings, block_size) for name, block_size in layouts.items()}
    full = wastes["the maximum reserved"]
    rows = [
        {"layout": name, "ratio": (1 - share) / (1 - full), "waste_share": share} for name, share in wastes.items()
    ]
    title = f"KV waste, {simulated.requests} requests, lengths exponential with mean {simulated.mean_length}"
    note = (
        f"At most {simulated.max_length} tokens each, {CONCURRENT} at a time, a token each per step, on BlockPool and "
        "BlockTable. Ratio: sequences that the same memory holds, against reserving the maximum."
    )
    return [Table(title, rows, note), engine_table(settings)]


def engine_table(settings: Settings) -> Table:
    rows = []
    for block_size in (16, 256):
        share, passes = engine_waste(settings, lengths(settings), block_size=block_size, running=CONCURRENT)
        rows.append({"layout": f"blocks of {block_size}", "waste_share": share, "passes": passes})
    title = f"KV waste of the engine's scheduler, the same lengths, {settings.waste.requests} requests"
    note = (
        f"A random part of each length is prompt, computed in chunks; at most {CONCURRENT} requests and {BUDGET} "
        "tokens a pass. No model: waste is a matter of bookkeeping."
    )
    return Table(title, rows, note)


def waste(settings: Settings, block_size: int) -> float:
    """Empty slots over held slots, both summed over all steps."""
    pool = BlockPool(CONCURRENT, block_size=block_size, growable=True)
    waiting = lengths(settings)
    running = admit([], waiting, pool)
    held = filled = 0
    while running:
        running = admit([sequence for sequence in running if grow(*sequence)], waiting, pool)
        held += pool.num_used * block_size
        filled += sum(table.num_tokens for table, _ in running)
    return 1 - filled / held


def lengths(settings: Settings) -> Iterator[int]:
    generator = random.Random(settings.seed)
    for _ in range(settings.waste.requests):
        yield min(settings.waste.max_length, max(1, round(generator.expovariate(1 / settings.waste.mean_length))))


def admit(running: list[Sequence], waiting: Iterator[int], pool: BlockPool) -> list[Sequence]:
    return running + [(BlockTable(pool), length) for length in islice(waiting, CONCURRENT - len(running))]


def grow(table: BlockTable, length: int) -> bool:
    """One token more; False when the sequence is finished and its blocks are back in the pool."""
    if table.num_tokens == length:
        table.release()
        return False
    table.append(1)
    return True
