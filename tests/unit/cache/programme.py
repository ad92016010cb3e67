"""Random programmes on a PagedCache beside a model of what it must hold."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_accel import PagedCache

LAYERS, HEADS, DIM = 2, 2, 4


def random_states(batch: int, columns: int, generator: random.Random) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(generator.randrange(2**30))
    keys, values = torch.randn(2, batch, HEADS, columns, DIM, generator=seeded)
    return keys, values


@dataclass
class Pair:
    """A PagedCache and a DynamicCache of full layers, which get the same calls."""

    paged: PagedCache
    dynamic: DynamicCache
    window: int | None
    batch: int = 0
    columns: int = 0

    def append(self, generator: random.Random) -> None:
        self.batch = self.batch or generator.randint(1, 3)
        num_new = generator.randint(1, 7)
        self.columns += num_new
        for layer in range(LAYERS):
            keys, values = random_states(self.batch, num_new, generator)
            expected = self.dynamic.update(keys, values, layer)
            actual = self.paged.update(keys, values, layer)
            self.compare(layer, actual, expected, num_new)

    def compare(self, layer: int, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], num_new: int) -> None:
        """All columns, or those that the queries of the new ones see."""
        sliding = self.paged.layers[layer].is_sliding
        seen = slice(max(0, self.columns - num_new - self.window + 1) if sliding and self.window else 0, None)
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.shape == theirs.shape
            assert torch.equal(ours[:, :, seen], theirs[:, :, seen])

    def compare_contents(self) -> None:
        """What the layers hold now, between two passes."""
        for layer, other in zip(self.paged.paged_layers, self.dynamic.layers, strict=True):
            seen = slice(max(0, self.columns - self.window + 1) if layer.is_sliding and self.window else 0, None)
            assert torch.equal(layer.columns()[0][:, :, seen], other.keys[:, :, seen])

    def crop(self, generator: random.Random) -> bool:
        """False where a sliding window has let go of what is needed: then nothing may have changed."""
        removed = generator.randint(1, min(9, self.columns))
        try:
            self.paged.crop(-removed)
        except ValueError:
            assert self.window is not None
            return False
        self.dynamic.crop(-removed)
        self.columns -= removed
        return True

    def reorder(self, generator: random.Random) -> None:
        indices = torch.tensor([generator.randrange(self.batch) for _ in range(self.batch)])
        self.paged.reorder_cache(indices)
        self.dynamic.reorder_cache(indices)

    def repeat(self, generator: random.Random) -> None:
        repeats = generator.randint(1, 3)
        if self.batch * repeats <= 6:
            self.paged.batch_repeat_interleave(repeats)
            self.dynamic.batch_repeat_interleave(repeats)
            self.batch *= repeats

    def select(self, generator: random.Random) -> None:
        indices = torch.tensor(generator.sample(range(self.batch), generator.randint(1, self.batch)))
        self.paged.batch_select_indices(indices)
        self.dynamic.batch_select_indices(indices)
        self.batch = len(indices)

    def reset(self) -> None:
        self.paged.reset()
        self.dynamic = DynamicCache()
        self.batch = self.columns = 0

    def fork(self) -> Pair:
        return copy.deepcopy(self)


def check_blocks(cache: PagedCache, *others: PagedCache) -> None:
    """Every reference of every block is held by a table, and none beside."""
    for number, group in enumerate(cache.pages.groups):
        tables = [row.tables[number] for c in (cache, *others) for row in c.padded.sequences]
        held = [block for table in tables for block in table.blocks]
        assert group.pool.num_used == len(set(held))
        assert all(group.pool.reference_count(block) == held.count(block) for block in set(held))
        assert group.pool.num_used + group.pool.num_free == group.pool.num_blocks
