"""Many clients at once, of whom some leave: nothing leaks, and every greedy answer is generate()'s own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hf_accel.serving.limits import Limits

from .load import Load, census, left_behind
from .running import serving

SMALL = {"max_tokens": 256}  # of the cache: those that run need more, so that some are preempted
FEW = Limits(max_running=8, max_queue=8)
MANY = Limits(max_running=32, max_queue=16)  # fewer than 64 clients ask for


def check(seconds: float, **loading: Any) -> None:
    with serving(**loading) as running:
        load, before = Load(running, seed=1), census()

        def has_seen_all() -> bool:
            counts, stats = load.outcome.counts, running.stats
            clients = min(counts["compared"], counts["left"], counts["told to come later"])
            return min(clients, stats["cancelled"], stats["preemptions"], stats["prefix_hits"]) > 0

        outcome = asyncio.run(load.run(seconds, has_seen_all))
        assert outcome.wrong == []
        assert has_seen_all(), (outcome.counts, running.stats)
        assert left_behind(running, before) == {}
        stats = running.stats
        assert stats["failed"] == 0
        assert stats["requests"] == stats["finished"] + stats["cancelled"]


@pytest.mark.parametrize(
    "speculative",
    [pytest.param(None, id="plain", marks=pytest.mark.long), pytest.param("ngram", id="drafts")],  # drafts see all
)
def test_clients_come_and_go(speculative: str | None) -> None:
    check(2.0, limits=FEW, speculative=speculative, engine=SMALL)


@pytest.mark.long
def test_clients_come_and_go_for_30_seconds() -> None:
    check(30, limits=MANY, engine={"max_tokens": 1024})
