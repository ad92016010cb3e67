"""Choose from the product of a test's parameters the tests that `make test` runs; `make test-all` runs the product.

Of a test of three parameters or more, any two of their values meet in a test that is chosen. What depends on three
values at once takes `@pytest.mark.covering(3)`; where the parameters have nothing to do with each other,
`@pytest.mark.covering(1)` says that each value in one test will do. A machine may have to skip all tests of an
instruction set or of a backend: so those of each are chosen by themselves. Instruction sets are one code: with that
which this machine takes all values meet as said; any other is one of the values. What is not chosen is marked `long`.
So is, by `some_long`, a kind that goes through the same code as another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest

from hf_accel.kernels import cpu

STRENGTH = 2  # how many values meet
LEVEL, BACKEND = "isa", "backend"  # parameters of which a machine may have to skip values
CASE = type(pytest.param())
Row = tuple[int, ...]  # the place of the value of each parameter among its values


def mark_others_long(items: Iterable[pytest.Item]) -> None:
    """Mark the tests as long that are not chosen from those of their function."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("long") is None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in groups.values():
        chosen = chosen_of(group)
        for place, item in enumerate(group):
            if place not in chosen:
                item.add_marker(pytest.mark.long)


def chosen_of(items: list[Any]) -> set[int]:
    """Return the places of the tests of one function that are chosen."""
    rows, mark = rows_of(items), items[0].get_closest_marker("covering")
    strength = STRENGTH if mark is None else mark.args[0]
    if len(rows[0]) <= strength:
        return set(range(len(items)))
    parts: dict[tuple[Any, int], list[int]] = {}
    for place, item in enumerate(items):
        parts.setdefault((item.callspec.params.get(LEVEL), id(item.callspec.params.get(BACKEND))), []).append(place)
    own = level_taken(level for level, _ in parts)
    return {
        part[place]
        for (level, _), part in parts.items()
        for place in covering([rows[each] for each in part], max(1, strength - (level != own)))
    }


def level_taken(levels: Iterable[Any]) -> Any:
    """Return which of the values of LEVEL this machine takes; the first one where it takes none of them."""
    known = list(levels)
    taken = None if cpu.refusal() is not None else cpu.isa()
    return taken if taken in known else known[0]


def rows_of(items: list[Any]) -> list[Row]:
    """Return the row of each test of one function. What one parametrize mark gives together is one parameter."""
    together: dict[str, str] = {}
    for mark in items[0].iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        together |= dict.fromkeys(names, names[0])
    places: dict[tuple[str, Any], int] = {}
    rows = []
    for item in items:
        values: dict[str, list[int]] = {}  # those of a parameter are the same objects in each test
        for name, value in item.callspec.params.items():
            values.setdefault(together.get(name, name), []).append(id(value))
        rows.append(tuple(places.setdefault((name, tuple(ids)), len(places)) for name, ids in values.items()))
    return rows


def covering(rows: list[Row], strength: int) -> set[int]:
    """Return the places of few rows in which each combination of so many values is that any row has.

    Of rows that have as many new single values, that is taken whose other values are rarest so far. Pairs are best
    taken in order.
    """
    wanted = [set(combinations(enumerate(row), strength)) for row in rows]
    left, chosen, taken = set().union(*wanted), set(), Counter[tuple[int, int]]()
    while left:
        news = [len(each & left) for each in wanted]
        most = max(news)
        best = min(
            (place for place, new in enumerate(news) if new == most),
            key=lambda place: sum(taken[value] for value in enumerate(rows[place])) if strength == 1 else 0,
        )
        chosen.add(best)
        taken.update(enumerate(rows[best]))
        left -= wanted[best]
    return chosen


def some_long(values: Iterable[Any], *names: Any) -> list[Any]:
    """Return the values of a parameter, of which those in `names` are behind the mark `long`.

    They are what goes through the same code as others of the values; a covering selection cannot tell them.
    """
    cases = [value if isinstance(value, CASE) else pytest.param(value) for value in values]
    known = [case.values[0] for case in cases]
    assert all(name in known for name in names), f"not all of {names} are values"
    long = pytest.mark.long
    return [
        pytest.param(*case.values, marks=[*case.marks, long], id=case.id) if case.values[0] in names else case
        for case in cases
    ]


def seeds(now: int, most: int) -> list[Any]:
    """Return the seeds of random programmes: the first ones, and behind the mark `long` as many as there are."""
    return [*range(now), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(now, most))]
