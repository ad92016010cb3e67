"""Context parallel over two processes: the tokens of one, half of the keys and values, and an end to all waiting."""

from __future__ import annotations

from typing import Any

import pytest

from ..test_examples import EXAMPLES
from .context_ranks import (
    CASES,
    compare,
    example,
    half_way,
    late,
    longer_than_one_rank_holds,
    other_prompts,
    refusals,
    served,
)
from .ranks import Ranks

ROUNDING = 2e-5  # of logits in float32, as a share of the largest
SECONDS = 1.5


def check_case(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        where = f"{name}, rank {rank}"
        assert found["two"] == found["one"], where
        assert found["two"] == ranks[0]["two"], where
        assert found["share"] <= 0.55, where
        assert 0 < found["error"] < ROUNDING, where
        assert found["restored"], where


def check_refusals(said: list[str]) -> None:
    starts = [
        "context_parallel='world' must be a process group",
        "context_parallel= was asked for, but cache=None",
        "context_parallel= was asked for, but weights='auto' would be measured",
        "deterministic=True cannot be met: attention over several ranks rounds by where blocks are",
        "hf_accel plan",
        "max_time=",
        "ranks share out the context of this model, and this call has no paged cache",
        "ranks share out the context of this model, and the cache that it was given is whole",
        "ranks share out the context of this model, and this call has no paged cache",
    ]  # fmt: skip
    for text, start in zip(said, starts, strict=True):
        assert text.startswith(start), text
    assert "rank 0 of 2" in said[4]


def check_example(rank: int, lines: list[str]) -> None:
    names, said = zip(*(line.split(": ", 1) for line in lines), strict=True)
    assert names == tuple(
        f"rank {rank}, {what}" for what in ("100 tokens alone", "356 tokens alone", "356 tokens over 2 ranks", "stock")
    )
    (short, _), (together, tokens) = (text.split("; ") for text in (said[0], said[2]))
    assert short == together and "the cache holds 256" in said[1]
    assert tokens == said[3]


def test_two_ranks(ranks: Ranks) -> None:
    found = ranks.run(compare, list(CASES))
    for name in CASES:
        check_case(name, [each[name] for each in found])


def test_a_context_longer_than_one_rank_holds(ranks: Ranks) -> None:
    for each in ranks.run(longer_than_one_rank_holds):
        assert each["two bytes"] == each["one bytes"]
        assert "the cache holds 60" in each["one"] and each["two"] == each["stock"]


def test_example(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks.run(example, str(EXAMPLES / "context_parallel.py"))):
        check_example(rank, text.splitlines())


def test_batches_and_an_engine(ranks: Ranks) -> None:
    for one, two in ranks.run(served):
        assert one == two


def test_refusals(ranks: Ranks) -> None:
    check_refusals(ranks.run(refusals)[0])
    assert all(text.startswith("the ranks of context_parallel= do not compute") for text in ranks.run(other_prompts))


def test_a_rank_that_does_not_come(ranks: Ranks) -> None:
    message, seconds, pages = ranks.run(late, SECONDS)[0]
    assert message.startswith("rank 0 of 2 lost another rank while") and pages == 0
    assert seconds > SECONDS / 2


def test_a_killed_rank(ranks: Ranks) -> None:
    """The pipe of rank 1 ends, and rank 0 still answers."""
    outcomes = ranks.outcomes(ranks.send(half_way))
    assert outcomes[1] == (False, "the process ended, exit code -9")
    fine, (message, before, after) = outcomes[0]
    assert fine and message.startswith("rank 0 of 2 lost another rank while")
    assert before >= after == 0
    assert ranks.processes[0].is_alive()


@pytest.mark.long
def test_three_ranks() -> None:
    """Shares of unequal size, and ranks without any block of a sequence."""
    names = ["chunks", "beams", "samples", "window and softcap", "sinks and a window", "int8"]
    with Ranks(3) as ranks:
        found = ranks.run(compare, names)
        for name in names:
            check_case(name, [each[name] for each in found])
