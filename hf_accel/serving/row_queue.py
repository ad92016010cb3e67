"""The queue of an encoder: rows of all requests that wait are computed together, those of each request in turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from time import perf_counter
from typing import Any, Generic, TypeVar

from ..errors import HfAccelError

PASS_TOKENS = 8192  # of a pass, unless one row has more
Row = TypeVar("Row", bound=Sized)


class RowRequest(Generic[Row]):
    """Rows that are computed for one client. future: gets their results, in their order."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.future: Future[list[Any]] = Future()
        self.rows = rows
        # The longest first, so that rows of one length stand together in a pass.
        self.left = deque(sorted(range(len(rows)), key=lambda place: -len(rows[place])))
        self.results: dict[int, Any] = {}

    def cancel(self) -> None:
        self.future.cancel()

    def end(self, error: BaseException | None = None) -> None:
        """Hand out the results, or an error; a request that was cancelled gets none."""
        self.left.clear()
        with suppress(InvalidStateError):
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result([self.results[place] for place in range(len(self.rows))])


class RowQueue(Generic[Row]):
    """Computes the rows of requests in a thread of its own, pass by pass.

    model: what computes them, for those who describe it. compute: rows -> a result for each. max_rows: of a pass.
    A pass takes a row of each request in turn until it is full: a request of many rows delays no small one.
    """

    def __init__(self, model: Any, compute: Callable[[Sequence[Row]], Iterable[Any]], *, max_rows: int) -> None:
        self.model, self._compute, self._max_rows = model, compute, max_rows
        self._waiting: deque[RowRequest[Row]] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._counts = dict.fromkeys(
            ("requests", "finished", "cancelled", "failed", "passes", "computed_tokens", "busy_seconds"), 0.0
        )
        self._running = 0
        self._thread = threading.Thread(target=self._run, name="hf_accel rows", daemon=True)
        self._thread.start()

    @property
    def is_live(self) -> bool:
        return not self._closed

    @property
    def stats(self) -> dict[str, Any]:
        """Counts of requests, rows and passes so far. running: rows of the pass that is computed now."""
        with self._news:
            waiting = sum(len(request.left) for request in self._waiting)
            whole = {name: value if "seconds" in name else int(value) for name, value in self._counts.items()}
            return {**whole, "running": self._running, "waiting": waiting}

    def submit(self, rows: Sequence[Row]) -> RowRequest[Row]:
        """Put at least one row into the queue. Raises HfAccelError if the queue was closed."""
        request = RowRequest(rows)
        with self._news:
            if self._closed:
                raise HfAccelError("the queue of this encoder was closed; load it again")
            self._counts["requests"] += 1
            self._waiting.append(request)
            self._news.notify()
        return request

    def close(self, *, wait: bool = True) -> None:
        """End the thread after the pass that it computes; requests that wait get an error."""
        with self._news:
            self._closed = True
            self._news.notify()
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    break
                places = self._next_pass()
                self._running = len(places)
            if places:
                self._pass(places)
                places = []  # or its requests would live until the next pass
        for request in self._waiting:
            request.end(HfAccelError("the server ended before this was computed"))

    def _next_pass(self) -> list[tuple[RowRequest[Row], int]]:
        """Take rows of each request in turn. The request whose row is the last one taken is asked last by the next."""
        found: list[tuple[RowRequest[Row], int]] = []
        tokens = 0
        while self._waiting and len(found) < self._max_rows:
            request = self._waiting.popleft()
            if request.future.cancelled():
                self._counts["cancelled"] += 1
                continue
            tokens += len(request.rows[request.left[0]])
            if found and tokens > PASS_TOKENS:
                self._waiting.appendleft(request)
                break
            found.append((request, request.left.popleft()))
            if request.left:
                self._waiting.append(request)
        return found

    def _pass(self, places: Sequence[tuple[RowRequest[Row], int]]) -> None:
        start, error = perf_counter(), None
        rows = [request.rows[place] for request, place in places]
        try:
            results = self._compute(rows)
            for (request, place), result in zip(places, results, strict=True):
                request.results[place] = result
        except Exception as found:  # such as too little memory: the requests of this pass fail, and no other
            error = found
        ended = {id(request): request for request, _ in places if error or len(request.results) == len(request.rows)}
        with self._news:
            self._running = 0
            self._counts["passes"] += 1
            self._counts["computed_tokens"] += sum(map(len, rows))
            self._counts["busy_seconds"] += perf_counter() - start
            self._counts["failed" if error else "finished"] += len(ended)
            self._waiting = deque(request for request in self._waiting if id(request) not in ended)
        for request in ended.values():
            request.end(error)
