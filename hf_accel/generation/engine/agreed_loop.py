"""An EngineLoop in each of the processes that run one model together."""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass

from ...errors import LostRankError
from ..batcher import Batcher
from ..sequence import Sequence
from .engine_loop import EngineLoop


@dataclass(eq=False)
class AgreedLoop(EngineLoop):
    """Runs the same passes in each process; each submits the same requests in the same order.

    Requests and cancellations come to each process at a time of its own. So before each pass the process that leads
    says how many requests have begun by then, and which were cancelled; cancellations in the other processes do not
    count. A process without work takes no part: it waits for its own next request.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._arrived: deque[Sequence] = deque()  # which have not begun
        self._num_begun = self._num_numbered = 0
        self._numbers: dict[Sequence, int] = {}  # of sequences that have not ended: the same in all processes
        self._cancelled: list[Sequence] = []

    @property
    def _has_work(self) -> bool:
        return bool(self._arrived) or super()._has_work

    def _begin(self, leader: Sequence) -> None:
        self._arrived.append(leader)
        for sequence in (leader, *leader.followers):
            self._numbers[sequence] = self._num_numbered
            self._num_numbered += 1

    def _cancel(self, sequence: Sequence) -> None:
        if sequence in self._numbers:
            self._cancelled.append(sequence)

    def _end(self, sequence: Sequence, error: BaseException | None) -> None:
        self._numbers.pop(sequence, None)
        super()._end(sequence, error)

    def _step(self) -> None:
        self._agree()
        if self.batcher.has_work:
            super()._step()

    def _agree(self) -> None:
        """Begin and cancel what the leading process says."""
        cancelled = [self._numbers[sequence] for sequence in self._cancelled if sequence in self._numbers]
        begun, numbers = self.batcher.agreement.agree((self._num_begun + len(self._arrived), cancelled))
        self._cancelled.clear()
        while self._num_begun < begun:
            self._await_request()
            self._num_begun += 1
            super()._begin(self._arrived.popleft())
        of_number = {number: sequence for sequence, number in self._numbers.items()}
        for number in numbers:
            if number in of_number:
                super()._cancel(of_number[number])

    def _await_request(self) -> None:
        """Wait until this process has submitted the next request, which another has begun."""
        while not self._arrived:
            try:
                command = self._commands.get(timeout=self.batcher.agreement.timeout)
            except queue.Empty:
                command = None
            if command is None:
                raise LostRankError(
                    f"rank 0 has submitted {self._num_begun + 1} requests to its Engine, and this rank "
                    f"{self._num_begun}; submit the same requests in the same order on all ranks"
                )
            command()


def make_loop(batcher: Batcher) -> EngineLoop:
    """Make the loop for a Batcher: for this process alone, or for one of several that run the model."""
    return EngineLoop(batcher) if batcher.agreement.size == 1 else AgreedLoop(batcher)
