"""Verification with shared random numbers (Daliri, Musco, Suresh 2024, arXiv 2408.07978)."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from ....kernels import cpu
from ....kernels.cpu.draws import RACE, Draws, drawn_from
from ....tensors import Unread, integers, is_remote, known, sent
from ...sequence import Draft
from . import noise
from .verifier import Place, Verifier, accepted_of, first_rows, row_places

# All tokens of a row are raced if more than 512 and more than one in 8 of them are possible.
DENSE, LARGE = 8, 512
NOISE_ROWS = 16  # that race at once on a GPU: some float64 numbers for each token take memory


class SeededVerifier(Verifier):
    """Chooses each token as argmax(log p + gumbel), where the Gumbel numbers depend only on the seed and the position.

    The drafter uses the same Gumbel numbers with its own distribution, so both often choose the same token. The output
    depends on the seed and the model, but not on the draft.
    """

    name = "seeded"
    draws = RACE

    def draft_number(self, place: Place) -> int:
        return noise.race_key(place.seed, place.position)

    def drawn(self, probabilities: Tensor, places: abc.Sequence[Place]) -> Unread[list[int]]:
        return race(probabilities, [noise.race_key(place.seed, place.position) for place in places])

    def candidates(self, probabilities: Tensor, places: abc.Sequence[Place], count: int) -> list[list[int]]:
        """Return those that are first in a race; the model's own token wins one with the same numbers."""
        keys = [noise.race_key(place.seed, place.position) for place in places]
        ids = torch.arange(probabilities.shape[1], device=probabilities.device)
        starts = range(0, len(keys), NOISE_ROWS)
        parts = ((integers(keys[at : at + NOISE_ROWS]), probabilities[at : at + NOISE_ROWS]) for at in starts)
        speeds = [own / noise.exponentials(sent(some, own)[:, None], ids) for some, own in parts]
        return super().candidates(torch.cat(speeds), places, count) if speeds else []

    def verified(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place]
    ) -> Unread[list[list[int]]]:
        starts = first_rows(probabilities, drafts)
        if is_remote(probabilities):
            chosen = self.drawn(probabilities, row_places(places, drafts))
            return chosen.then(lambda tokens: accepted_of(drafts, tokens))
        return known(self._followed(probabilities, drafts, places, starts))

    def _followed(
        self, probabilities: Tensor, drafts: abc.Sequence[Draft], places: abc.Sequence[Place], starts: list[int]
    ) -> list[list[int]]:
        """Draw the tokens of those rows alone that are reached: one of each draft, until none equals a drafted one."""
        chosen: list[list[int]] = [[] for _ in drafts]
        rows = dict.fromkeys(range(len(drafts)), 0)
        while rows:
            now = [starts[index] + row for index, row in rows.items()]
            drawn = self.drawn(probabilities[now], [places[index].next(len(chosen[index])) for index in rows])
            for index, token in zip(rows, drawn.read(), strict=True):
                chosen[index].append(token)
            reached = {index: drafts[index].rows(chosen[index]) for index in rows}
            rows = {index: each[-1] for index, each in reached.items() if len(each) > len(chosen[index])}
        return chosen


def race(probabilities: Tensor, keys: abc.Sequence[int]) -> Unread[list[int]]:
    """For each row of [n, V], find the id with the smallest quotient of its exponential number and its probability.

    This is argmax(log p + gumbel). Among equal quotients it is the lowest id.
    """
    size = probabilities.shape[1]
    if is_remote(probabilities):  # what follows asks how many tokens are possible
        return Unread(_on_device(probabilities, keys), list)
    if cpu.refusal() is None:
        return known(_natively(probabilities, keys))
    enough = max(size // DENSE, LARGE)
    possible = (probabilities > 0).sum(-1).tolist()
    many = [row for row, count in enumerate(possible) if count > enough]
    few = [row for row, count in enumerate(possible) if count <= enough]
    winners = dict(zip(many, _over_all(probabilities, keys, many), strict=True))
    winners.update(zip(few, _over_possible(probabilities[few], [keys[row] for row in few]), strict=True))
    return known([winners[row] for row in range(len(keys))])


def _natively(probabilities: Tensor, keys: abc.Sequence[int]) -> list[int]:
    tokens: list[int] = drawn_from(probabilities, Draws(RACE), integers(keys)).tolist()
    return [token if token >= 0 else probabilities.shape[1] - 1 for token in tokens]


def _on_device(probabilities: Tensor, keys: abc.Sequence[int]) -> Tensor:
    """Race all tokens of all rows, without waiting for the device. Returns ids [n] int64."""
    ids = torch.arange(probabilities.shape[1], device=probabilities.device)
    moved = sent(integers(keys), probabilities)[:, None]
    starts = range(0, len(keys), NOISE_ROWS)
    parts = ((moved[start : start + NOISE_ROWS], probabilities[start : start + NOISE_ROWS]) for start in starts)
    winners = [(noise.exponentials(some, ids) / own).argmin(-1) for some, own in parts]
    return torch.cat(winners)


def _over_all(probabilities: Tensor, keys: abc.Sequence[int], rows: abc.Sequence[int]) -> list[int]:
    """Race all tokens of these rows, one row at a time, so that intermediate tensors stay in the CPU caches."""
    ids = torch.arange(probabilities.shape[1], device=probabilities.device)
    times = (noise.exponentials(ids.new_tensor(keys[row]), ids) / probabilities[row] for row in rows)
    return [int(row_times.argmin()) for row_times in times]


def _over_possible(probabilities: Tensor, keys: abc.Sequence[int]) -> list[int]:
    """Race only the tokens with a probability above 0, of all rows at once."""
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
