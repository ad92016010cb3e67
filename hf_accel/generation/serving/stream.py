"""What a program holds of a request that an engine computes: its tokens as they come, and its end."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from ...errors import UnsupportedError

if TYPE_CHECKING:
    from ..sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Generated:
    """What became of one sample.

    tokens: generated, those of a stop string included. logprobs: of each token, if they were asked for.
    finish_reason: "stop", "length" or "cancelled". text: of the tokens, if a tokenizer is there.
    """

    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None
    text: str | None = None


@dataclass(eq=False)
class Sleeper:
    """A coroutine that waits for more than `seen` tokens."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    seen: float


class Sample:
    """One stream of tokens, from one thread that produces to any number of threads and coroutines that read.

    Every iteration begins at the first token. Nothing that a reader does or leaves undone holds up the producer.
    """

    def __init__(
        self,
        *,
        decode: Callable[[list[int]], str] | None = None,
        on_cancel: Callable[[Sample], object] | None = None,
        on_wait: Callable[[str], object] | None = None,
        index: int = 0,
    ) -> None:
        self.index = index
        self._decode = decode
        self._on_cancel = on_cancel
        self._on_wait = on_wait
        self._changed = threading.Condition()
        self._ended = threading.Event()  # beside it, so that who waits for the end sleeps through the tokens
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._finish_reason: str | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._sleepers: list[Sleeper] = []

    # -- the producer ----------------------------------------------------------------------------------

    def put(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> bool:
        """Hand over tokens that are final. False if nobody wants them: the sample has ended, as by cancel()."""
        with self._changed:
            if self.done:
                return False
            self._tokens.extend(tokens)
            if logprobs is not None:
                self._logprobs = self._logprobs or []
                self._logprobs.extend(logprobs)
            self._wake()
        return True

    def finish(self, reason: str) -> None:
        """No more tokens come. Only the first end counts."""
        self._end(reason, None)

    def fail(self, error: BaseException) -> None:
        """No more tokens come, and readers get this error after those that came."""
        self._end("failed", error)

    def orphan(self, error: BaseException) -> None:
        """In a process forked from the producer's: it fails, if it has not ended. Who held a lock is not here."""
        ended = self._ended.is_set()
        self._changed, self._ended, self._sleepers = threading.Condition(), threading.Event(), []
        if ended:
            self._ended.set()
        self.fail(error)

    def _end(self, reason: str, error: BaseException | None) -> bool:
        with self._changed:
            if self.done:
                return False
            self._error = error
            self._traceback = None if error is None else error.__traceback__
            self._finish_reason = reason
            self._ended.set()
            self._wake()
        return True

    def _wake(self) -> None:
        self._changed.notify_all()
        if not self._sleepers:
            return
        awake = [s for s in self._sleepers if self.done or len(self._tokens) > s.seen]
        self._sleepers = [s for s in self._sleepers if s not in awake]
        for sleeper in awake:
            try:
                sleeper.loop.call_soon_threadsafe(_resolve, sleeper.future)
            except RuntimeError:  # the loop was closed: its reader is gone
                continue

    # -- the readers -----------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def finish_reason(self) -> str | None:
        """One of "stop", "length", "cancelled", "failed"; None while tokens may come."""
        return self._finish_reason

    def cancel(self) -> None:
        """End it now, with the tokens that came; what is still computed of it is dropped. Again: no effect."""
        if self._end("cancelled", None) and self._on_cancel is not None:
            self._on_cancel(self)

    def __iter__(self) -> Iterator[int]:
        """The tokens as they come; waits for them. Raises the error of a sample that failed."""
        seen = 0
        while True:
            self._about_to_wait(seen)
            with self._changed:
                self._changed.wait_for(lambda: len(self._tokens) > seen or self.done)  # noqa: B023
                new = self._tokens[seen:]
            if not new:
                return self._raise_error()
            yield from new
            seen += len(new)

    async def __aiter__(self) -> AsyncIterator[int]:
        seen = 0
        while True:
            await self._sleep(seen)
            new = self._tokens[seen:]
            for token in new:
                yield token
            if not new:
                self._raise_error()
                return
            seen += len(new)

    async def _sleep(self, seen: float) -> None:
        """Until there are more than `seen` tokens, or the end has come."""
        loop = asyncio.get_running_loop()
        self._about_to_wait(seen)
        with self._changed:
            if self.done or len(self._tokens) > seen:
                return
            sleeper = Sleeper(loop, loop.create_future(), seen)
            self._sleepers.append(sleeper)
        try:
            await sleeper.future
        finally:
            with self._changed:
                if sleeper in self._sleepers:  # the reader was cancelled
                    self._sleepers.remove(sleeper)

    def result(self, timeout: float | None = None) -> Generated:
        """Wait for the end, at most `timeout` seconds (then TimeoutError; the sample goes on)."""
        self._about_to_wait(math.inf)
        if not self._ended.wait(timeout):
            raise TimeoutError(f"not finished after {timeout} seconds, with {len(self._tokens)} tokens so far")
        return self._generated()

    async def aresult(self) -> Generated:
        """As result(), for coroutines."""
        await self._sleep(math.inf)
        return self._generated()

    def _about_to_wait(self, seen: float) -> None:
        """For more than `seen` tokens. Raises what on_wait does for who must not."""
        if self._on_wait is not None and not self.done and len(self._tokens) <= seen:
            self._on_wait("waiting for tokens")

    def _generated(self) -> Generated:
        self._raise_error()
        assert self._finish_reason is not None
        return Generated(
            tokens=list(self._tokens),
            finish_reason=self._finish_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            text=None if self._decode is None else self._decode(list(self._tokens)),
        )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # not the frames of those who raised it before


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_numbers = itertools.count()


class Request:
    """The handle of what was submitted: `num_samples` continuations of one prompt, each a Sample of its own.

    Read as one stream, it is its first sample; done when all are, cancelled and failed as a whole.

    decode: token ids -> the text of Generated. on_cancel: called once with each sample that a reader cancels, in the
    reader's thread. on_wait: called there, with words for what it does, before a reader waits, which it may refuse.
    """

    def __init__(
        self,
        *,
        num_samples: int = 1,
        id: object = None,
        decode: Callable[[list[int]], str] | None = None,
        on_cancel: Callable[[Sample], object] | None = None,
        on_wait: Callable[[str], object] | None = None,
    ) -> None:
        if num_samples < 1:
            raise UnsupportedError(f"num_samples={num_samples}; give at least 1")
        self.id = next(_numbers) if id is None else id
        self.samples = [
            Sample(decode=decode, on_cancel=on_cancel, on_wait=on_wait, index=i) for i in range(num_samples)
        ]

    def __repr__(self) -> str:
        ends = ", ".join(sample.finish_reason or "running" for sample in self.samples)
        return f"Request({self.id}: {ends})"

    # -- the producer ----------------------------------------------------------------------------------

    def put(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> bool:
        """Of the first sample, as `finish`; others have their own."""
        return self.samples[0].put(tokens, logprobs)

    def finish(self, reason: str) -> None:
        self.samples[0].finish(reason)

    def fail(self, error: BaseException) -> None:
        """Every sample that has not ended fails."""
        for sample in self.samples:
            sample.fail(error)

    # -- the readers -----------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return all(sample.done for sample in self.samples)

    @property
    def finish_reason(self) -> str | None:
        return self.samples[0].finish_reason

    def cancel(self) -> None:
        for sample in self.samples:
            sample.cancel()

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples[0])

    def __aiter__(self) -> AsyncIterator[int]:
        return self.samples[0].__aiter__()

    def result(self, timeout: float | None = None) -> Generated:
        """Wait for the first sample, at most `timeout` seconds (then TimeoutError). Raises its error if it failed."""
        return self.samples[0].result(timeout)

    def results(self, timeout: float | None = None) -> list[Generated]:
        """Wait for all samples, at most `timeout` seconds together."""
        end = None if timeout is None else time.monotonic() + timeout
        return [sample.result(None if end is None else max(0.0, end - time.monotonic())) for sample in self.samples]

    async def aresult(self) -> Generated:
        return await self.samples[0].aresult()

    async def aresults(self) -> list[Generated]:
        return [await sample.aresult() for sample in self.samples]
