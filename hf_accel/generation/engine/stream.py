"""The program's side of a request: streams of its tokens, and its results."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from ...errors import UnsupportedError

if TYPE_CHECKING:
    from ..sampling.choice import TokenLogprobs


@dataclass(frozen=True)
class Generated:
    """The result of one sample.

    tokens: the generated tokens, with those of a stop string. finish_reason: "stop", "length" or "cancelled".
    logprobs: one for each token, or None if none were requested. text: the text of the tokens without the stop string
    or the token that ended them, or None if there is no tokenizer.
    """

    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None
    text: str | None = None


# New tokens of a sample, and one entry of log-probabilities for each; None if none were requested.
Piece: TypeAlias = "tuple[list[int], list[TokenLogprobs] | None]"


@dataclass(eq=False)
class Waiter:
    """A coroutine that waits until a sample has more than `seen` tokens."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    seen: float


class Sample:
    """A stream of tokens. One thread produces them, and any number of threads and coroutines read them.

    Every iteration begins at the first token. The producer never waits for a reader.
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
        self._ended = threading.Event()  # so that new tokens do not wake readers that wait for the end
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None
        self._finish_reason: str | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._waiters: list[Waiter] = []

    # -- the producer ----------------------------------------------------------------------------------

    def put(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> bool:
        """Append final tokens. Returns False if the sample has already ended, for example by cancel()."""
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
        """End the sample. A sample that has ended stays as it is."""
        self._end(reason, None)

    def fail(self, error: BaseException) -> None:
        """End the sample with an error, which readers get after the tokens."""
        self._end("failed", error)

    def orphan(self, error: BaseException) -> None:
        """Fail in a process that was forked from the producer's, unless the sample has ended.

        The locks are replaced, because a thread that held one is missing here.
        """
        ended = self._ended.is_set()
        self._changed, self._ended, self._waiters = threading.Condition(), threading.Event(), []
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
        if not self._waiters:
            return
        awake = [w for w in self._waiters if self.done or len(self._tokens) > w.seen]
        self._waiters = [w for w in self._waiters if w not in awake]
        for waiter in awake:
            try:
                waiter.loop.call_soon_threadsafe(_resolve, waiter.future)
            except RuntimeError:  # the event loop was closed, so its reader has ended
                continue

    # -- the readers -----------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def finish_reason(self) -> str | None:
        """One of "stop", "length", "cancelled" and "failed"; None while more tokens may come."""
        return self._finish_reason

    def cancel(self) -> None:
        """End the sample now with the tokens so far. A sample that has ended stays as it is."""
        if self._end("cancelled", None) and self._on_cancel is not None:
            self._on_cancel(self)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the tokens, and wait for those still to come. Raises the sample's error, if any."""
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
        async for tokens, _ in self.pieces():
            for token in tokens:
                yield token

    async def pieces(self) -> AsyncIterator[Piece]:
        """Iterate over the tokens in pieces: each is all that came since the last one, with its log-probabilities.

        Raises the sample's error, if any, after its tokens.
        """
        seen = 0
        while True:
            await self._wait_for_more(seen)
            with self._changed:
                new = self._tokens[seen:]
                logprobs = None if self._logprobs is None else self._logprobs[seen : seen + len(new)]
            if not new:
                self._raise_error()
                return
            yield new, logprobs
            seen += len(new)

    async def _wait_for_more(self, seen: float) -> None:
        """Wait until there are more than `seen` tokens, or the sample has ended."""
        loop = asyncio.get_running_loop()
        self._about_to_wait(seen)
        with self._changed:
            if self.done or len(self._tokens) > seen:
                return
            waiter = Waiter(loop, loop.create_future(), seen)
            self._waiters.append(waiter)
        try:
            await waiter.future
        finally:
            with self._changed:
                if waiter in self._waiters:  # this coroutine was cancelled
                    self._waiters.remove(waiter)

    def result(self, timeout: float | None = None) -> Generated:
        """Wait until the sample has ended, and return its result. Raises the sample's error, if any.

        Raises TimeoutError after `timeout` seconds; the sample then goes on.
        """
        self._about_to_wait(math.inf)
        if not self._ended.wait(timeout):
            raise TimeoutError(f"not finished after {timeout} seconds, with {len(self._tokens)} tokens so far")
        return self._generated()

    async def aresult(self) -> Generated:
        """The same as result(), for coroutines and without a timeout."""
        await self._wait_for_more(math.inf)
        return self._generated()

    def __await__(self) -> Generator[Any, None, Generated]:
        return self.aresult().__await__()

    def _about_to_wait(self, seen: float) -> None:
        """Call on_wait if a reader has to wait for more than `seen` tokens. on_wait raises if the reader must not."""
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
            raise self._error.with_traceback(self._traceback)  # without the frames of readers that raised it before


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_numbers = itertools.count()


class Request:
    """A submitted request: `num_samples` continuations of one prompt, each of which is a Sample.

    To iterate over the request is to iterate over its first sample, and `await request` gives the result of that one.
    It is done when all samples are; cancel() ends all samples.

    decode: maps token ids to the text of Generated. on_cancel: is called once with each sample that a reader cancels,
    in the reader's thread. on_wait: is called in the reader's thread, with a description of the wait, before the
    reader waits; it may raise to forbid this.
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
        """Wait for the result of the first sample; see Sample.result."""
        return self.samples[0].result(timeout)

    def results(self, timeout: float | None = None) -> list[Generated]:
        """Wait for the results of all samples, at most `timeout` seconds together (then TimeoutError)."""
        end = None if timeout is None else time.monotonic() + timeout
        return [sample.result(None if end is None else max(0.0, end - time.monotonic())) for sample in self.samples]

    async def aresult(self) -> Generated:
        return await self.samples[0].aresult()

    def __await__(self) -> Generator[Any, None, Generated]:
        return self.samples[0].__await__()

    async def aresults(self) -> list[Generated]:
        return [await sample.aresult() for sample in self.samples]
