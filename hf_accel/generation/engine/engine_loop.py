"""Runs a Batcher in its own thread, which accepts requests while it runs, in one process or in several together."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import HfAccelError, LostRankError
from ..batcher import Batcher, Progress
from ..sampling.choice import TokenLogprobs
from ..sequence import Sequence

CLOSED = "the engine is closed; make a new one"
FORKED = (
    "this process was forked from the one whose thread runs the engine, and does not have this thread; make a new "
    "Engine here, or better, start processes with multiprocessing's \"spawn\", because torch's threads are missing too"
)


class Handle(Protocol):
    """Receives the tokens and the end of a sequence. It is called in the engine's thread.

    The loop holds only a weak reference to it. When the program no longer holds it, the sequence is cancelled.
    """

    def put(self, tokens: Many[int], logprobs: Many[TokenLogprobs] | None = None) -> object: ...

    def finish(self, reason: str) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def orphan(self, error: BaseException) -> None:
        """Fail in a process that was forked from the engine's, because no more tokens come there."""


@dataclass
class Totals:
    """Counts since the engine was started. busy_seconds: the time spent in passes."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    new_tokens: int = 0
    busy_seconds: float = 0.0


@dataclass(eq=False)
class EngineLoop:
    """Runs the passes of a Batcher in its own thread.

    Only this thread uses the Batcher. Other threads put commands into a queue for it.

    An error of a single sequence ends only this sequence. If a whole pass fails, it is not known which sequence caused
    it. So each of its sequences is then computed alone, and those that fail alone end with their error. Signals do not
    interrupt this thread, because it is not the main one. So exceptions such as SystemExit come from a request too,
    and are handled in the same way.
    """

    batcher: Batcher
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handles: dict[Sequence, weakref.ref[Handle]] = {}
        self._submitted: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._refusal: str | None = None  # why no more requests are accepted
        self._error: BaseException | None = None  # the error that ended the thread
        # Reentrant, because the garbage collector may call retire() while this thread holds the lock.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        # Thread.join is not used: if it is interrupted, a running thread looks ended.
        self._ended = threading.Event()

    # -- from any thread -------------------------------------------------------------------------------

    def submit(self, leader: Sequence, handles: Mapping[Sequence, Handle]) -> None:
        """Accept a sequence with its followers. handles: receives the tokens of each of them.

        Raises HfAccelError if the loop is closed, has broken, or belongs to another process.
        """
        with self._lock:
            if self._refusal is not None:
                raise HfAccelError(self._refusal) from self._error
            self.start()
            references = {sequence: weakref.ref(handle) for sequence, handle in handles.items()}
            self._submitted.update(handles.values())
            self._commands.put(lambda: self._add(leader, references))

    def start(self) -> None:
        """Start the thread. The first submit() starts it too."""
        with self._lock:
            if self._thread is None:
                _started.add(self)
                thread = threading.Thread(target=self._run, name="hf_accel engine", daemon=True)
                thread.start()
                self._thread = thread

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Compute no pass within the `with` block. Requests go on after it.

        Raises HfAccelError if the thread does not run, and in the engine's own thread.
        """
        self.refuse_own_thread("pause()")
        paused, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            paused.set()
            go_on.wait()

        with self._lock:
            if not self.is_running:
                raise HfAccelError(f"there is nothing to pause: {self._refusal or 'nothing was started'}")
            self._commands.put(wait)
        try:
            while not paused.wait(0.1) and self.is_running:
                pass
            yield
        finally:
            go_on.set()

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence after the current pass. A sequence that has ended stays as it is."""
        self._commands.put(lambda: self._cancel(sequence))

    def fail(self, error: BaseException) -> None:
        """End all requests with an error after the current pass, and accept no more."""

        def raise_it() -> None:
            raise error

        self._commands.put(raise_it)

    def close(self, *, wait: bool, timeout: float | None = None) -> None:
        """Accept no more requests, and return when all have ended, or after `timeout` seconds.

        wait: whether requests may finish; otherwise they are cancelled. If an interrupt (KeyboardInterrupt) comes
        while this waits, requests are cancelled, and the interrupt is raised after the current pass: an interpreter
        that ends while a thread is in a pass would abort.
        """
        self.refuse_own_thread("close()")
        try:
            if not wait:
                self._commands.put(self._cancel_all)
            self._await_end(timeout)
        except BaseException:
            self._commands.put(self._cancel_all)
            self._await_end()
            raise

    def _await_end(self, timeout: float | None = None) -> None:
        self.retire()
        if self._thread is not None:
            self._ended.wait(timeout)

    def retire(self, *, cancel: bool = False) -> None:
        """Accept no more requests, and end the thread when all have ended. This does not wait.

        cancel: whether requests are cancelled; otherwise they may finish.
        """
        with self._lock:
            self._refusal = self._refusal or CLOSED
        if cancel:
            self._commands.put(self._cancel_all)
        self._commands.put(None)

    @property
    def is_live(self) -> bool:
        """True if the thread runs, or may still be started."""
        return self._error is None and (self._refusal is None or self.is_running)

    @property
    def error(self) -> BaseException | None:
        """The error that ended the loop; None if there is none."""
        return self._error

    @property
    def is_running(self) -> bool:
        """True if the thread runs."""
        return self._thread is not None and not self._ended.is_set()

    def refuse_own_thread(self, what: str) -> None:
        """Raise HfAccelError in the engine's thread (in a logits processor, say), which would wait for itself."""
        if self._thread is not None and threading.current_thread() is self._thread:
            raise HfAccelError(f"{what} in the engine's own thread would wait for itself for ever; do it in another")

    def forked(self) -> None:
        """Fail all requests in a forked process, where the thread is missing and its locks are never released."""
        self._lock, self._thread = threading.RLock(), None
        self._commands, self._handles = queue.SimpleQueue(), {}
        self._refusal = FORKED
        for handle in list(self._submitted):
            handle.orphan(HfAccelError(FORKED))

    # -- in the engine's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # This is no error of a pass. All handles get it, so that no reader waits for ever.
            self._break(error)
        finally:
            self._ended.set()

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self._refusal, self._error = f"the engine broke ({error!r}); make a new one", error
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                with contextlib.suppress(Exception):  # of fail(), when it has broken already
                    command()
        for sequence in list(self._handles):
            with contextlib.suppress(Exception):  # the batcher may be broken, but every handle must get the error
                self.batcher.remove(sequence, "error", error)
            self._end(sequence, error)

    def _serve(self) -> None:
        closing = False
        while not closing or self._has_work:
            if not self._has_work:
                closing |= self._run_next_command() is None
            while not self._commands.empty():
                closing |= self._run_next_command() is None  # which no variable keeps alive
            if self._has_work:
                self._step()
        self._cancel_all()
        self.batcher.close()

    @property
    def _has_work(self) -> bool:
        return self.batcher.has_work

    def _run_next_command(self) -> Any:
        """Wait for a command, run it, and return it; None is the last command."""
        command = self._commands.get()
        if command is not None:
            command()
        return command

    def _add(self, leader: Sequence, handles: dict[Sequence, weakref.ref[Handle]]) -> None:
        self._handles |= handles
        self.totals.requests += len(handles)
        self._begin(leader)

    def _begin(self, leader: Sequence) -> None:
        try:
            self.batcher.add(leader)
        except LostRankError:
            raise
        except Exception as error:
            for sequence in (leader, *leader.followers):
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
            results = self.batcher.step()
        except BaseException as error:
            results = self._handle_failed_pass(error)
        self.totals.busy_seconds += time.perf_counter() - start
        for progress in results:
            self._deliver(progress)

    def _handle_failed_pass(self, error: BaseException) -> list[Progress]:
        """End the sequence that caused the error, or run the sequences of the pass alone to find it.

        All sequences have the tokens that they had before the pass.
        """
        suspects = [sequence for sequence in self.batcher.in_pass if not sequence.is_finished]
        if not suspects or isinstance(error, LostRankError):
            raise error
        if len(suspects) == 1:
            self.batcher.remove(suspects[0], "error", error)
            self._end(suspects[0], error)
        else:
            self.batcher.isolate(suspects)
        return self.batcher.take_failed()

    def _deliver(self, progress: Progress) -> None:
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
        elif handle is None:  # the program no longer holds the handle
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
            handle.fail(_as_exception(error))
        else:
            handle.finish(reason)


def _as_exception(error: BaseException) -> Exception:
    """Wrap an error that is not an Exception, which would end the thread or event loop that reads the request."""
    if isinstance(error, Exception):
        return error
    wrapped = HfAccelError(f"the request ended by {error!r}, raised in the engine's thread")
    wrapped.__cause__ = error
    return wrapped


_started: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _close_all() -> None:
    """Close all loops when the interpreter ends. It would abort if a thread were in a pass."""
    for loop in list(_started):
        loop.close(wait=False)


def _forked() -> None:
    for loop in list(_started):
        loop.forked()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


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
