"""Verification with shared random numbers (Daliri, Musco, Suresh 2024, arXiv 2408.07978)."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from ...sequence import Draft
from . import noise
from .verifier import Place, Verifier, first_rows, follow

DENSE, LARGE = 8, 512  # a row is raced over all tokens if more than one in 8 of them, and 512, are possible


class SeededVerifier(Verifier):
    """Each token is the winner of a race that only the seed and its position decide: argmax(log p + gumbel).

    The drafter runs the same race with its own distribution, so the two often agree. The output depends on the seed
    and the model alone, whatever was drafted.
    """

    name = "seeded"

    def draw(self, probabilities: Tensor, places: abc.Sequence[Place]) -> list[int]:
        return race(probabilities, [noise.race_key(place.seed, place.position) for place in places])

    def verify(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> list[list[int]]:
        first_rows(probabilities, drafts)
        every = [
            place.next(j) for draft, place in zip(drafts, places, strict=True) for j in range(len(draft) + 1)
        ]  # fmt: skip
        return follow(drafts, self.draw(probabilities, every))


def race(probabilities: Tensor, keys: abc.Sequence[int]) -> list[int]:
    """For each row of [n, V] the id with the smallest exponential number over probability; of equals the lowest."""
    size = probabilities.shape[1]
    enough = max(size // DENSE, LARGE)
    possible = (probabilities > 0).sum(-1).tolist()
    many = [row for row, count in enumerate(possible) if count > enough]
    few = [row for row, count in enumerate(possible) if count <= enough]
    winners = dict(zip(many, _over_all(probabilities, keys, many), strict=True))
    winners.update(zip(few, _over_possible(probabilities[few], [keys[row] for row in few]), strict=True))
    return [winners[row] for row in range(len(keys))]


def _over_all(probabilities: Tensor, keys: abc.Sequence[int], rows: abc.Sequence[int]) -> list[int]:
    """Row after row, so that what is in between stays in the caches."""
    ids = torch.arange(probabilities.shape[1], device=probabilities.device)
    times = (noise.exponentials(ids.new_tensor(keys[row]), ids) / probabilities[row] for row in rows)
    return [int(one.argmin()) for one in times]


def _over_possible(probabilities: Tensor, keys: abc.Sequence[int]) -> list[int]:
    device = probabilities.device
    rows, ids = probabilities.nonzero(as_tuple=True)
    times = noise.exponentials(torch.tensor(keys, dtype=torch.int64, device=device)[rows], ids)
    times /= probabilities[rows, ids]
    best = torch.full((len(keys),), torch.inf, dtype=torch.float64, device=device)
    best.scatter_reduce_(0, rows, times, "amin")
    first = times == best[rows]
    winners = torch.full((len(keys),), probabilities.shape[1] - 1, dtype=torch.int64, device=device)
    winners.scatter_reduce_(0, rows[first], ids[first], "amin")
    return [int(token) for token in winners.tolist()]
