"""A few threads that quantize weights. Torch, the kernels and hashlib release the interpreter's lock meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

MOST_WORKERS = 4  # each holds a weight twice while it packs it

Result = TypeVar("Result")


class Workers(Generic[Result]):
    """Runs jobs in `count` threads that share torch's threads; a context manager.

    At most `count` jobs run or wait to be read at any time, so that they hold little memory. With one thread a job
    runs at once, in the caller's thread.
    """

    def __init__(self, count: int | None = None) -> None:
        threads = torch.get_num_threads()
        self.count = min(threads, MOST_WORKERS) if count is None else count
        self._under_way: set[Future[Result]] = set()
        self._pool = _start(self.count, max(1, threads // self.count)) if self.count > 1 else None

    def put(self, job: Callable[[], Result]) -> list[Result]:
        """Start a job as soon as a thread is free, and return the results that are ready.

        Raises the error of an earlier job.
        """
        if self._pool is None:
            return [job()]
        finished = self._collect(FIRST_COMPLETED) if len(self._under_way) == self.count else []
        self._under_way.add(self._pool.submit(job))
        return finished

    def finish(self) -> list[Result]:
        """Wait for all jobs, and return the results that were not returned yet."""
        return self._collect("ALL_COMPLETED")

    def _collect(self, when: str) -> list[Result]:
        done, self._under_way = wait(self._under_way, return_when=when)
        return [future.result() for future in done]

    def __enter__(self) -> Workers[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the jobs that have not begun, wait for those that have, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._under_way.clear()


def _start(count: int, threads: int) -> ThreadPoolExecutor:
    """Make a pool of `count` threads, each of which uses `threads` threads of torch."""
    total, ready = torch.get_num_threads(), threading.Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(threads)  # of this thread, and of every thread that begins later
        torch.get_num_threads()  # a thread takes over the number of the process the first time it is asked for
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="hf_accel", initializer=begin)
    for _ in range(count):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(total)  # so that only ours keep the smaller number
    return pool
