"""Processes that are ranks of one gloo group on this CPU, kept alive to run functions of tests.

Importing torch, transformers and a server takes most of the time, so one process does it and is forked for each rank
(multiprocessing's "forkserver"). One pair (the fixture `ranks`) is sent the functions of all modules. Nothing here
waits for ever: who does not answer in time is killed with all the others. Each function finds a group that works, with
its timeout as it was at first, whatever the ones before it did.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

# Longer than anything takes on a machine that others keep busy too; a rank that hangs costs this once.
START_SECONDS = 300.0  # for a process to import torch and meet the others
SECONDS = 300.0  # for one function
GROUP_SECONDS = 120.0  # for a collective: less, so that what hangs in one is told by its traceback


class RankError(AssertionError):
    """A rank raised, died or did not answer. failures: what each rank that failed said, by its number."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"-- rank {rank} --\n{what}" for rank, what in sorted(failures.items())))


class Ranks:
    """`with Ranks(2) as ranks: results = ranks.run(function, *arguments)`.

    The function is one of a module, so that it can be found by its name, and is called as function(*arguments) in
    every rank, where torch.distributed is set up; what it returns comes back in the order of the ranks. Plain data
    alone should be sent either way.
    """

    def __init__(self, size: int = 2, *, group_timeout: float = GROUP_SECONDS) -> None:
        """group_timeout: seconds that a collective waits for the other ranks before it raises."""
        self.size, self.group_timeout = size, group_timeout
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = get_context("forkserver")
        context.set_forkserver_preload([f"{__package__}.preloaded"])
        self._ends: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            place = {"rank": rank, "size": self.size, "store": str(Path(self._folder.name) / "store")}
            settings = place | {"group_timeout": self.group_timeout}
            process = context.Process(target=_serve, args=(theirs,), kwargs=settings, daemon=True)
            process.start()
            theirs.close()  # so that its death is the end of the pipe
            self._ends.append(ours)
            self.processes.append(process)
        self._collect(range(self.size), START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.kill()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = SECONDS) -> list[Any]:
        """What the function returned in each rank; RankError, with all ranks killed, if one died or was too slow.

        If it only raised, in whichever ranks, RankError holds the tracebacks. The next function then gets new ranks,
        because collectives of these may have been left half-way.
        """
        return self._collect(self.send(function, *arguments), timeout)

    def send(self, function: Callable[..., Any], *arguments: Any) -> range:
        """Let the function begin in all ranks; `outcomes` waits for it. If one has died, all are started again."""
        if not all(process.is_alive() for process in self.processes):
            self.kill()
            self._start()
        for end in self._ends:
            end.send((function, arguments))
        return range(len(self._ends))

    def outcomes(self, expected: Sequence[int], timeout: float = SECONDS) -> dict[int, tuple[bool, Any]]:
        """For each expected rank: whether it returned, and the result, or else its traceback or that it died."""
        found: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(found) < len(expected):
            waiting = [self._ends[rank] for rank in expected if rank not in found]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                found |= {rank: (False, f"no answer in {timeout} s") for rank in expected if rank not in found}
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    found[rank] = self._ends[rank].recv()
                except (EOFError, ConnectionError):
                    self.processes[rank].join(5)
                    found[rank] = (False, self._death(rank))
        return found

    def _death(self, rank: int) -> str:
        """How a rank's process ended: its exit code and, after a signal of a fault, where its threads were."""
        words = _last_words(Path(self._folder.name), rank)
        said = words.read_text() if words.exists() else ""
        return f"the process ended, exit code {self.processes[rank].exitcode}\n{said}".rstrip()

    def _collect(self, expected: Sequence[int], timeout: float) -> list[Any]:
        found = self.outcomes(expected, timeout)
        failures = {rank: str(what) for rank, (fine, what) in found.items() if not fine}
        if failures:
            self.kill()
            raise RankError(failures)
        return [found[rank][1] for rank in expected]

    def kill(self) -> None:
        """End all processes, whatever they do."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()


def run_ranks(function: Callable[..., Any], *arguments: Any, size: int = 2, timeout: float = SECONDS) -> list[Any]:
    """`Ranks.run` in processes that are started for it alone."""
    with Ranks(size) as ranks:
        return ranks.run(function, *arguments, timeout=timeout)


def set_timeout(seconds: float, group: Any = None) -> None:
    """Give the collectives of a group, or of that of all ranks, another timeout: until the function ends."""
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _last_words(folder: Path, rank: int) -> Path:
    """The file in which a rank that dies of a fault says where each of its threads was."""
    return folder / f"rank{rank}.txt"


def _serve(end: Connection, *, rank: int, size: int, store: str, group_timeout: float) -> None:
    """A rank's life: join the group, then run what is sent, until the pipe closes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}  # transformers reads these
    torch.set_num_threads(1)
    words = _last_words(Path(store).parent, rank).open("w")  # open as long as this process lives
    faulthandler.enable(words)
    try:
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=group_timeout),
        )
        end.send((True, None))
        while True:
            function, arguments = end.recv()
            torch.manual_seed(0)
            set_timeout(group_timeout)
            try:
                answer = (True, function(*arguments))
            except Exception:
                answer = (False, traceback.format_exc())
            end.send(answer)
    except (EOFError, ConnectionError):  # the test is over
        pass
    except Exception:
        end.send((False, traceback.format_exc()))
