"""What `make test` leaves out of a product of parameters loses no pair of values."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from hf_accel.kernels import cpu

from .selection import chosen_of, covering, seeds, some_long


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


def test_single_values_are_shared_out_evenly() -> None:
    rows = list(product(range(12), range(3)))
    chosen = [rows[place] for place in covering(rows, 1)]
    assert len(chosen) == 12 and [sum(b == each for _, b in chosen) for each in range(3)] == [4, 4, 4]


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


def pairs_of_each(name: str, made: list[Any]) -> dict[Any, int]:
    """How many pairs of two other values meet with each value of a parameter."""
    chosen = [made[place].callspec.params for place in chosen_of(made)]
    return {
        value: len({(id(each["a"]), id(each["b"])) for each in chosen if each[name] is value})
        for value in {each[name] for each in chosen}
    }


def test_each_backend_is_covered_by_itself() -> None:
    assert list(pairs_of_each("backend", items("backend", "a", "b", "c")).values()) == [9, 9, 9]


def test_one_instruction_set_meets_all_and_each_other_meets_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    made = items("isa", "a", "b")
    taken = made[9].callspec.params["isa"]
    monkeypatch.setattr(cpu, "refusal", lambda: None)
    monkeypatch.setattr(cpu, "isa", lambda: taken)
    pairs = pairs_of_each("isa", made)
    assert pairs.pop(taken) == 9
    assert list(pairs.values()) == [3, 3]
    monkeypatch.setattr(cpu, "refusal", lambda: "no compiler")
    assert pairs_of_each("isa", made)[made[0].callspec.params["isa"]] == 9


def test_seeds_that_wait() -> None:
    first, second, *waiting = seeds(2, 5)
    assert (first, second) == (0, 1)
    assert [(each.values, [mark.name for mark in each.marks]) for each in waiting] == [
        ((seed,), ["long"]) for seed in (2, 3, 4)
    ]


def test_named_values_are_long_and_keep_their_marks() -> None:
    skipped = pytest.param("b", 2, marks=pytest.mark.skip, id="two")
    first, second, third = some_long(["a", skipped, "c"], "b", "c")
    assert (first.values, first.marks) == (("a",), ())
    assert second.values == ("b", 2) and second.id == "two"
    assert [mark.name for mark in second.marks] == ["skip", "long"] and [mark.name for mark in third.marks] == ["long"]
    with pytest.raises(AssertionError, match="are values"):
        some_long(["a"], "b")
