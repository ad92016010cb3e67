"""A Batcher that runs in a thread of its own, and takes requests while it does."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import HfAccelError
from ..batcher import Batcher, Progress
from ..sampling.logprobs import TokenLogprobs
from ..sequence import Sequence

CLOSED = "the engine is closed; make a new one"
FORKED = (
    "this process was forked from the one whose thread runs the engine, and has no such thread; make an Engine of its "
    "own here, or rather start processes by multiprocessing's \"spawn\": torch's own threads do not come along either"
)


class Handle(Protocol):
    """What is told of a sequence, in the engine's thread. When nobody holds it any more, the sequence ends."""

    def put(self, tokens: Many[int], logprobs: Many[TokenLogprobs] | None = None) -> object: ...

    def finish(self, reason: str) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def orphan(self, error: BaseException) -> None:
        """In a process forked from this one: nothing more comes."""


@dataclass
class Totals:
    """Since the engine began."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    new_tokens: int = 0
    busy_seconds: float = 0.0


@dataclass(eq=False)
class EngineLoop:
    """Runs a Batcher as long as there is something to do.

    All bookkeeping happens in one thread; others leave commands for it.
    An error that one sequence meets by itself ends that one. Of a pass that fails as a whole nobody knows whose fault
    it was, so each of its sequences is computed again alone, and the one that fails then has failed. As the thread is
    not the main one, no signal interrupts it: what is no Exception (SystemExit, say) comes from a request too.
    """

    batcher: Batcher
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._handles: dict[Sequence, weakref.ref[Handle]] = {}
        self._told: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._refusal: str | None = None  # why nothing more is taken on
        self._error: BaseException | None = None  # that ended the thread
        self._lock = threading.RLock()  # what is forgotten may retire in the middle of anything
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # not Thread.join: an interrupt in it makes a running thread look ended

    # -- from any thread -------------------------------------------------------------------------------

    def submit(self, leader: Sequence, handles: Mapping[Sequence, Handle]) -> None:
        """Take on a sequence with its followers; what happens to each is told to its handle."""
        with self._lock:
            if self._refusal is not None:
                raise HfAccelError(self._refusal) from self._error
            self.start()
            references = {sequence: weakref.ref(handle) for sequence, handle in handles.items()}
            self._told.update(handles.values())
            self._commands.put(lambda: self._add(leader, references))

    def start(self) -> None:
        """Begin to compute; the first request does so too."""
        with self._lock:
            if self._thread is None:
                _started.add(self)
                thread = threading.Thread(target=self._run, name="hf_accel engine", daemon=True)
                thread.start()
                self._thread = thread

    @contextmanager
    def pause(self) -> Iterator[None]:
        """For the length of a `with` block no pass is computed; what is under way goes on after it."""
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
        """End it as soon as the pass under way is over; what has ended already stays as it is."""
        self._commands.put(lambda: self._cancel(sequence))

    def close(self, *, wait: bool, timeout: float | None = None) -> None:
        """Take on nothing more, and return when all has ended, or after `timeout` seconds. wait: let requests finish,
        else cancel them.

        An interrupt while it waits cancels them, and is raised when the pass under way is over: a thread in the middle
        of one aborts an interpreter that ends.
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
            self._over.wait(timeout)

    def retire(self, *, cancel: bool = False) -> None:
        """Nobody can submit any more: end when those who hold a handle have been served, or cancelled. Never waits."""
        with self._lock:
            self._refusal = self._refusal or CLOSED
        if cancel:
            self._commands.put(self._cancel_all)
        self._commands.put(None)

    @property
    def is_live(self) -> bool:
        """Whether it computes, or may be asked to."""
        return self._refusal is None or self.is_running

    @property
    def is_running(self) -> bool:
        """Whether its thread is there."""
        return self._thread is not None and not self._over.is_set()

    def refuse_own_thread(self, what: str) -> None:
        """Raise HfAccelError where the engine's thread would wait for itself, as in a logits processor."""
        if self._thread is not None and threading.current_thread() is self._thread:
            raise HfAccelError(f"{what} in the engine's own thread would wait for itself for ever; do it in another")

    def forked(self) -> None:
        """In a child process: the thread is not there, and whatever it held is held for ever."""
        self._lock, self._thread = threading.RLock(), None
        self._commands, self._handles = queue.SimpleQueue(), {}
        self._refusal = FORKED
        for handle in list(self._told):
            handle.orphan(HfAccelError(FORKED))

    # -- in the engine's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # not of a pass: nobody may wait for ever
            self._break(error)
        finally:
            self._over.set()

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self._refusal, self._error = f"the engine broke ({error!r}); make a new one", error
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for sequence in list(self._handles):
            with contextlib.suppress(Exception):  # of what is broken; that everyone is told comes first
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
        self.batcher.close()

    def _wait(self) -> Any:
        """The next command, done; None if it is the last."""
        command = self._commands.get()
        if command is not None:
            command()
        return command

    def _add(self, leader: Sequence, handles: dict[Sequence, weakref.ref[Handle]]) -> None:
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
        except BaseException as error:
            brought = self._blame(error)
        self.totals.busy_seconds += time.perf_counter() - start
        for progress in brought:
            self._tell(progress)

    def _blame(self, error: BaseException) -> list[Progress]:
        """A pass failed, and every sequence is as it was before."""
        suspects = [sequence for sequence in self.batcher.in_pass if not sequence.is_finished]
        if not suspects:
            raise error
        if len(suspects) == 1:
            self.batcher.remove(suspects[0], "error", error)
            self._end(suspects[0], error)
        else:
            self.batcher.isolate(suspects)
        return self.batcher.take_failed()

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
            handle.fail(_harmless(error))
        else:
            handle.finish(reason)


def _harmless(error: BaseException) -> Exception:
    """What is no Exception would end the thread or the event loop of whoever waits for the request."""
    if isinstance(error, Exception):
        return error
    told = HfAccelError(f"the request ended by {error!r}, raised in the engine's thread")
    told.__cause__ = error
    return told


_started: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _leave() -> None:
    """When the interpreter ends: it would abort if a thread were in the middle of a pass."""
    for loop in list(_started):
        loop.close(wait=False)


def _forked() -> None:
    for loop in list(_started):
        loop.forked()


atexit.register(_leave)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
