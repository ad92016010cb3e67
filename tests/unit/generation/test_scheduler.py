from __future__ import annotations

import pytest

from .programme import Programme, pages_of

PAGES = {
    "one group": {"num_blocks": (14,), "windows": (None,)},
    "tight": {"num_blocks": (9,), "windows": (None,), "block_size": 3},
    "full and sliding": {"num_blocks": (14, 14), "windows": (None, 6)},
    "sliding pool smaller": {"num_blocks": (16, 8), "windows": (None, 7)},
    "sliding alone": {"num_blocks": (5,), "windows": (9,)},
    "blocks of one": {"num_blocks": (50,), "windows": (None,), "block_size": 1},
    "growing": {"num_blocks": (1, 1), "windows": (None, 6), "growable": True},
}
OPTIONS = [
    {"token_budget": None},
    {"token_budget": 16},
    {"token_budget": 5, "max_running": 3},
    {"token_budget": 2, "patience": 1},
    {"token_budget": 1},
]


def run(seed: int, steps: int, kind: str, options: dict[str, int]) -> Programme:
    setting = dict(PAGES[kind])
    programme = Programme(seed, pages_of(*setting.pop("num_blocks"), **setting), **options)  # type: ignore[misc, arg-type]
    for _ in range(steps):
        programme.step()
    programme.drain()
    return programme


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", PAGES)
def test_random_programmes(kind: str, options: dict[str, int]) -> None:
    for seed in range(3):
        programme = run(seed, 150, kind, options)
        print(
            kind,
            options,
            programme.ended,
            programme.forked,
            programme.restarted,
            programme.shared,
            programme.scheduler.num_preempted,
            programme.refused,
        )
