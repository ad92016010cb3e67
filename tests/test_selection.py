"""What `make test` leaves out of a product of parameters loses no pair of values."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from .selection import BY_THEMSELVES, chosen_of, covering, seeds


def combined(rows: list[tuple[int, ...]], strength: int) -> set[Any]:
    return {each for row in rows for each in combinations(enumerate(row), strength)}


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 5), (2, 3, 2, 4)], ids=str)
def test_all_values_meet_in_few_tests(sizes: tuple[int, ...], strength: int) -> None:
    rows = list(product(*map(range, sizes)))
    chosen = [rows[place] for place in covering(rows, strength)]
    assert combined(chosen, strength) == combined(rows, strength)
    fewest = 1
    for size in sorted(sizes)[-strength:]:
        fewest *= size
    assert fewest <= len(chosen) <= min(2 * fewest, len(rows))


def test_what_a_product_leaves_out_is_not_asked_for() -> None:
    rows = [(0, 0), (0, 1), (1, 1)]
    assert covering(rows, 2) == {0, 1, 2} and covering(rows, 1) == {0, 2}


def items(*names: str, strength: int | None = None) -> list[Any]:
    """The tests of a function with three values of each parameter."""
    values = [object() for _ in range(3)]
    marks = {"covering": None if strength is None else SimpleNamespace(args=(strength,))}
    return [
        SimpleNamespace(
            callspec=SimpleNamespace(params=dict(zip(names, each, strict=True))),
            iter_markers=lambda name: [SimpleNamespace(args=(each,)) for each in names],
            get_closest_marker=marks.get,
        )
        for each in product(values, repeat=len(names))
    ]


def test_only_products_of_three_parameters_are_cut() -> None:
    assert len(chosen_of(items("a", "b"))) == 9
    assert 9 <= len(chosen_of(items("a", "b", "c"))) < 18
    assert len(chosen_of(items("a", "b", "c", strength=3))) == 27
    assert len(chosen_of(items("a", "b", strength=1))) == 3


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_each_of_what_a_machine_may_not_have_is_covered(name: str) -> None:
    made = items(name, "a", "b", "c")
    chosen = [made[place].callspec.params for place in chosen_of(made)]
    for value in {id(each[name]) for each in chosen}:
        pairs = {(id(each["a"]), id(each["b"])) for each in chosen if id(each[name]) == value}
        assert len(pairs) == 9


def test_seeds_that_wait() -> None:
    first, second, *waiting = seeds(2, 5)
    assert (first, second) == (0, 1)
    assert [(each.values, [mark.name for mark in each.marks]) for each in waiting] == [
        ((seed,), ["long"]) for seed in (2, 3, 4)
    ]
