from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from hf_accel.linear import Workers


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def results(workers: Workers[int], jobs: list) -> list[int]:
    finished = [result for job in jobs for result in workers.put(job)]
    return finished + workers.finish()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_result_once(count: int) -> None:
    with Workers[int](count) as workers:
        assert sorted(results(workers, [partial(int, i) for i in range(20)])) == list(range(20))
        assert workers.finish() == []


@pytest.mark.parametrize("count", [2, 3])
def test_no_more_jobs_than_threads_at_a_time(count: int) -> None:
    """Those that are finished and not read yet counted in: they hold memory as well."""
    begun = 0
    lock = threading.Lock()

    def job() -> int:
        nonlocal begun
        with lock:
            begun += 1
        return 1

    read = 0
    with Workers[int](count) as workers:
        for _ in range(30):
            read += len(workers.put(job))
            assert begun - read <= count
        assert read + len(workers.finish()) == 30


def test_jobs_run_beside_each_other() -> None:
    both = threading.Barrier(2)
    with Workers[int](2) as workers:
        assert len(results(workers, [partial(both.wait, 10), partial(both.wait, 10)])) == 2


def test_one_thread_is_the_caller_s() -> None:
    with Workers[int](1) as workers:
        assert workers.put(threading.get_ident) == [threading.get_ident()]


def test_threads_share_torch_s_and_leave_the_caller_its_own(four_threads: None) -> None:
    seen: list[int] = []
    with Workers[int](2) as workers:
        assert results(workers, [torch.get_num_threads] * 6) == [2] * 6
        assert torch.get_num_threads() == 4
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [4]
    assert Workers[int]().count == 4


def test_an_exception_reaches_the_caller_and_ends_the_rest() -> None:
    def fail() -> int:
        raise KeyError("broken")

    before = set(threading.enumerate())  # those of blocks that another test has kept may still run
    with pytest.raises(KeyError, match="broken"), Workers[int](2) as workers:
        results(workers, [fail] + [partial(int, i) for i in range(50)])
    assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("hf_accel")]
