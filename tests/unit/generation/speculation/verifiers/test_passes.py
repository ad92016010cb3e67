"""The law of several passes, where a rejected position is drafted and verified again: exact, by enumeration.

A state is the tokens so far and every random number that was looked at and may be looked at again. A pass splits each
state by the cells of the numbers that it has not seen yet; a number that it has seen keeps its value.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from hf_accel.generation.sequence import Draft
from hf_accel.generation.speculation.verifiers import BlockVerifier, Place, TokenVerifier
from hf_accel.generation.speculation.verifiers.noise import Purpose

from .enumeration import Case, Kind, Tokens, acceptance_thresholds, cells, last_token_edges

P, Q = [0.5, 0.5], [0.9, 0.1]
TOTAL = 3
Key = tuple[int, int, int]  # position, purpose, offset
Naming = Callable[[int, int, int], Key]


def fresh(position: int, purpose: int, offset: int) -> Key:
    return position, purpose, offset


def again(position: int, purpose: int, offset: int) -> Key:
    """Numbers that know only their position come again when it is drafted anew."""
    return position, purpose, 0


def splits(kind: Kind) -> dict[int, list[tuple[float, float]]]:
    """For each purpose cells in which no answer of any pass changes."""
    p, q = torch.tensor([P] * 3, dtype=torch.float64), torch.tensor([Q] * 2, dtype=torch.float64)
    cases = [
        Case(p[: count + 1], Draft(list(tokens), q[:count]), (), (0.0,) * (count + 1))
        for count in (1, 2)
        for tokens in itertools.product(range(2), repeat=count)
    ]
    limits = acceptance_thresholds(kind, cases)
    tried = [
        Case(case.p, case.draft, tuple(middle for middle, _ in combination), case.target)
        for case, own in zip(cases, limits, strict=True)
        for combination in itertools.product(*(cells([limit]) for limit in own))
    ]
    last = [edge for edges in last_token_edges(kind, tried) for edge in edges]
    return {
        Purpose.DRAFT: cells([Q[0]]),
        Purpose.ACCEPT: cells([limit for own in limits for limit in own]),
        Purpose.TARGET: cells([P[0], *last]),
    }


def keys_of_pass(start: int, naming: Naming, is_drawn: bool) -> list[Key]:
    length = TOTAL - start - 1
    kinds = (Purpose.DRAFT, Purpose.ACCEPT) if is_drawn else ()
    drafted = [naming(start + j, purpose, j) for j in range(length) for purpose in kinds]
    return drafted + [naming(start + j, Purpose.TARGET, 0) for j in range(length + 1)]


def law_of_passes(kind: Kind, naming: Naming, is_drawn: Callable[[int], bool]) -> dict[Tokens, float]:
    widths = splits(kind)
    states: dict[tuple[Tokens, frozenset[tuple[Key, float]]], float] = {((), frozenset()): 1.0}
    for start in range(TOTAL):
        later = {key for s in range(start + 1, TOTAL) for key in keys_of_pass(s, naming, is_drawn(s))}
        here = [state for state in states if len(state[0]) == start]
        worlds = []
        for tokens, known in here:
            weight, numbers = states.pop((tokens, known)), dict(known)
            unseen = [key for key in keys_of_pass(start, naming, is_drawn(start)) if key not in numbers]
            for combination in itertools.product(*(widths[key[1]] for key in unseen)):
                world = numbers | {key: middle for key, (middle, _) in zip(unseen, combination, strict=True)}
                share = weight
                for _, width in combination:
                    share *= width
                worlds.append((tokens, world, share))
        for (tokens, world, share), new in zip(
            worlds,
            one_pass(kind, naming, [world for _, world, _ in worlds], start, is_drawn=is_drawn(start)),
            strict=True,
        ):
            whole = tokens + tuple(new)
            kept = frozenset((key, value) for key, value in world.items() if key in later and key[0] >= len(whole))
            states[whole, kept] = states.get((whole, kept), 0.0) + share
    law: dict[Tokens, float] = defaultdict(float)
    for (tokens, _), weight in states.items():
        law[tokens] += weight
    return law


def one_pass(
    kind: Kind, naming: Naming, worlds: list[dict[Key, float]], start: int, *, is_drawn: bool
) -> list[list[int]]:
    verifier = kind(lambda seed, position, purpose, offset: worlds[seed][naming(position, purpose, offset)])
    length = TOTAL - start - 1
    places = [Place(seed, start) for seed in range(len(worlds))]
    drafts = [Draft([seed % 2] * length) for seed in range(len(worlds))]
    if is_drawn and length:
        q = torch.tensor([Q] * length, dtype=torch.float64)
        drawn = verifier.draw(q.repeat(len(worlds), 1), [place.next(j) for place in places for j in range(length)])
        drafts = [Draft(drawn[at * length : (at + 1) * length], q) for at in range(len(worlds))]
    p = torch.tensor([P], dtype=torch.float64).expand(len(worlds) * (length + 1), -1)
    return verifier.verify(p, drafts, places)


def largest_error(law: dict[Tokens, float]) -> float:
    expected = {
        string: P[string[0]] * P[string[1]] * P[string[2]] for string in itertools.product(range(2), repeat=TOTAL)
    }
    return max(abs(law.get(string, 0.0) - value) for string, value in expected.items())


@pytest.mark.parametrize("kind", [TokenVerifier, BlockVerifier])
@pytest.mark.parametrize(
    "is_drawn",
    [
        pytest.param(lambda start: True, id="drawn"),
        pytest.param(lambda start: start % 2 == 0, id="drawn, looked up, in turn"),
        pytest.param(lambda start: start % 2 == 1, id="looked up, drawn, in turn"),
    ],
)
def test_passes_keep_the_law(kind: Kind, is_drawn: Callable[[int], bool]) -> None:
    assert largest_error(law_of_passes(kind, fresh, is_drawn)) < 1e-12


def test_numbers_that_come_again_harm_blocks_only() -> None:
    """Why DRAFT and ACCEPT numbers depend on the offset: a block's later tokens decide about its earlier ones."""
    assert largest_error(law_of_passes(TokenVerifier, again, lambda start: True)) < 1e-12
    assert largest_error(law_of_passes(BlockVerifier, again, lambda start: True)) > 0.01


@pytest.mark.parametrize("length", [1, 3, 7])
def test_no_place_comes_twice(length: int) -> None:
    """Whatever number of tokens each pass adds."""
    seen = set()
    for added in itertools.product(range(1, length + 2), repeat=3):
        seen.clear()
        start = 0
        for count in added:
            places = [(Place(0, start).next(j).position, Place(0, start).next(j).offset) for j in range(length)]
            assert not seen.intersection(places)
            seen.update(places)
            start += count
