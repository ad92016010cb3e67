"""The launcher of ranks: results in order, tracebacks, death and silence are told, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from .ranks import RankError, Ranks


def total(numbers: list[int]) -> tuple[int, int]:
    mine = torch.tensor(numbers[torch.distributed.get_rank()])
    torch.distributed.all_reduce(mine)
    return torch.distributed.get_rank(), int(mine)


def fail_on_one() -> int:
    if torch.distributed.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    return 0


def sleep_on_one() -> None:
    time.sleep(600 * torch.distributed.get_rank())


def die_on_zero(number: int) -> None:
    if torch.distributed.get_rank() == 0:
        os.kill(os.getpid(), number)
        time.sleep(60)


def test_results_tracebacks_and_silence() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(total, [3, 4]) == [(0, 7), (1, 7)]
        with pytest.raises(RankError, match="rank 1 has had enough") as raised:
            ranks.run(fail_on_one)
        assert list(raised.value.failures) == [1]
        assert ranks.run(total, [1, 1]) == [(0, 2), (1, 2)]  # new ones
        with pytest.raises(RankError, match=r"no answer in 0\.5 s"):
            ranks.run(sleep_on_one, timeout=0.5)
        assert not any(process.is_alive() for process in ranks.processes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "what"),
    [
        pytest.param(signal.SIGKILL, r"exit code -9$", id="killed"),
        pytest.param(signal.SIGABRT, r"(?s)exit code -6\nFatal Python error: Aborted.*in die_on_zero", id="aborted"),
    ],
)
def test_death_is_told_and_ends_the_others(number: int, what: str) -> None:
    with Ranks(2) as ranks:
        with pytest.raises(RankError, match=what) as raised:
            ranks.run(die_on_zero, int(number))
        assert list(raised.value.failures) == [0]
        assert not any(process.is_alive() for process in ranks.processes)
