"""Requests: prompts and output lengths drawn at random, and when they arrive."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

DISTRIBUTIONS: dict[str, Callable[[random.Random, float], float]] = {
    "fixed": lambda generator, mean: mean,
    "uniform": lambda generator, mean: generator.uniform(0, 2 * mean),
    "exponential": lambda generator, mean: generator.expovariate(1 / mean),
}


@dataclass(frozen=True)
class Requests:
    """prompts: token ids; lengths: of each, how many tokens are to be generated; arrivals: seconds from the start."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    arrivals: list[float] | None = None

    @property
    def useful(self) -> int:
        """The number of tokens that the requests ask for."""
        return sum(self.lengths)

    @property
    def needed(self) -> int:
        """The number of tokens that a model must compute without padding or sharing: the last generated one is never
        fed.
        """
        return sum(map(len, self.prompts)) + self.useful - len(self.lengths)

    @property
    def padded(self) -> int:
        """The number of tokens that one batch of equal rows computes."""
        return len(self.prompts) * (max(map(len, self.prompts)) + max(self.lengths) - 1)

    @property
    def variation(self) -> float:
        """The coefficient of variation of the drawn lengths."""
        return statistics.pstdev(self.lengths) / statistics.fmean(self.lengths)

    def first(self, count: int, *, most_new: int | None = None) -> Requests:
        """Return the first requests; none asks for more than `most_new` tokens."""
        lengths = [length if most_new is None else min(length, most_new) for length in self.lengths[:count]]
        return Requests(self.name, self.prompts[:count], lengths)


def draw(
    distribution: str, *, requests: int, mean: float, prompt_lengths: tuple[int, int], vocabulary: int, seed: int
) -> Requests:
    """Draw output lengths from `distribution` (see DISTRIBUTIONS), scaled to this mean; prompt lengths are uniform."""
    generator = random.Random(seed)
    sizes = [generator.randint(*prompt_lengths) for _ in range(requests)]
    prompts = [[generator.randrange(vocabulary) for _ in range(size)] for size in sizes]
    drawn = [DISTRIBUTIONS[distribution](generator, mean) for _ in range(requests)]
    scale = mean / statistics.fmean(drawn)
    lengths = [max(1, round(scale * length)) for length in drawn]
    return Requests(f"{distribution}, mean {mean:g}", prompts, lengths)


def poisson(workload: Requests, *, per_second: float, seed: int) -> Requests:
    """Return the same requests with random arrivals at this rate, the first at once."""
    generator = random.Random(seed)
    gaps = [0.0, *(generator.expovariate(per_second) for _ in workload.prompts[1:])]
    return Requests(workload.name, workload.prompts, workload.lengths, list(accumulate(gaps)))


def shared_prefix(*, requests: int, shared: int, own: int, new: int, vocabulary: int, seed: int) -> Requests:
    """Make prompts that begin with the same `shared` tokens, followed by `own` different ones."""
    tokens = _tokens(random.Random(seed), vocabulary)
    system = [next(tokens) for _ in range(shared)]
    prompts = [system + [next(tokens) for _ in range(own)] for _ in range(requests)]
    return Requests(f"{requests} requests after {shared} shared tokens", prompts, [new] * requests)


def _tokens(generator: random.Random, vocabulary: int) -> Iterator[int]:
    while True:
        yield generator.randrange(vocabulary)
