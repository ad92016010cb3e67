"""A Batcher that runs in a thread of its own, and takes requests while it does."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import HfAccelError
from .batcher import Batcher, Progress
from .sequence import Sequence
from .stream import Sample


@dataclass
class Totals:
    """Since the engine began."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    new_tokens: int = 0
    busy_seconds: float = 0.0


@dataclass
class EngineLoop:
    """Runs a Batcher as long as there is something to do.

    All bookkeeping happens in one thread; others leave commands for it. before_work: called there each time work
    begins after a pause.
    """

    batcher: Batcher
    before_work: Callable[[], None] = lambda: None
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handles: dict[Sequence, weakref.ref[Sample]] = {}
        self._closing = False
        self._error: BaseException | None = None  # that ended the thread
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # -- from any thread -------------------------------------------------------------------------------

    def submit(self, leader: Sequence, handles: dict[Sequence, Sample]) -> None:
        """Take on a sequence with its followers; what happens to each is told to its handle."""
        with self._lock:
            if self._error is not None:
                raise HfAccelError(f"the engine broke ({self._error!r}); make a new one") from self._error
            if self._closing:
                raise HfAccelError("the engine is closed; make a new one")
            if self._thread is None:
                atexit.register(self._leave)  # a thread in the middle of a pass aborts an interpreter that ends
                self._thread = threading.Thread(target=self._run, name="hf_accel engine", daemon=True)
                self._thread.start()
            references = {sequence: weakref.ref(handle) for sequence, handle in handles.items()}
            self._commands.put(lambda: self._add(leader, references))

    def cancel(self, sequence: Sequence) -> None:
        """End it as soon as the pass under way is over; what has ended already stays as it is."""
        self._commands.put(lambda: self._cancel(sequence))

    def close(self, *, wait: bool) -> None:
        """Take on nothing more, and return when all has ended. wait: let requests finish, else cancel them."""
        with self._lock:
            self._closing = True
            thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self._leave)
        if not wait:
            self._commands.put(self._cancel_all)
        self._commands.put(None)
        thread.join()

    def _leave(self) -> None:
        self.close(wait=False)

    # -- in the engine's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # not of a pass: nobody may wait for ever
            self._break(error)

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for sequence in list(self._handles):
            self.batcher.remove(sequence, "error", error)
            self._end(sequence, error)

    def _serve(self) -> None:
        closing = False
        while not closing or self.batcher.has_work:
            if not self.batcher.has_work:
                closing |= self._wait() is None
            while not self._commands.empty():
                command = self._commands.get()
                closing |= command is None
                if command is not None:
                    command()
            if self.batcher.has_work:
                self._step()
        self._cancel_all()

    def _wait(self) -> Any:
        """The next command, done; None if it is the last."""
        command = self._commands.get()
        if command is not None:
            command()
            self.before_work()
        return command

    def _add(self, leader: Sequence, handles: dict[Sequence, weakref.ref[Sample]]) -> None:
        self._handles |= handles
        self.totals.requests += len(handles)
        try:
            self.batcher.add(leader)
        except Exception as error:
            for sequence in handles:
                self._end(sequence, error)

    def _cancel(self, sequence: Sequence) -> None:
        if sequence in self._handles:
            self.batcher.remove(sequence, "cancelled")
            self._end(sequence, None)

    def _cancel_all(self) -> None:
        for sequence in list(self._handles):
            self._cancel(sequence)

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            brought = self.batcher.step()
        except Exception as error:  # of the model itself: whose tokens it was cannot be told
            for sequence in [s for s in self.batcher.in_pass if s in self._handles]:
                self.batcher.remove(sequence, "error", error)
                self._end(sequence, error)
            brought = []
        self.totals.busy_seconds += time.perf_counter() - start
        for progress in brought:
            self._tell(progress)

    def _tell(self, progress: Progress) -> None:
        sequence = progress.sequence
        reference = self._handles.get(sequence)
        if reference is None:
            return
        self.totals.new_tokens += len(progress.tokens)
        handle = reference()
        if handle is not None and progress.tokens:
            handle.put(progress.tokens, progress.logprobs)
        if sequence.is_finished:
            self._end(sequence, progress.error)
        elif handle is None:  # nobody can ask for the rest
            self._cancel(sequence)

    def _end(self, sequence: Sequence, error: BaseException | None) -> None:
        reference = self._handles.pop(sequence, None)
        handle = None if reference is None else reference()
        reason = sequence.finish_reason or "error"
        self.totals.failed += error is not None
        self.totals.cancelled += reason == "cancelled"
        self.totals.finished += error is None and reason != "cancelled"
        if handle is None:
            return
        if error is not None:
            handle.fail(error)
        else:
            handle.finish(reason)
