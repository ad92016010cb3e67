"""Compiles what answers must match on threads of its own, so that no other request waits for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ..errors import UnsupportedError
from .api_errors import ApiError, unavailable
from .bodies import Common

THREADS = 2  # each schema takes a few seconds of one at most
LONGEST_WAIT = 30.0  # seconds of a request
RETRY = 5


class Compiling:
    """The threads that compile schemas, regular expressions and grammars."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "hf_accel grammar")

    async def compile(self, engine: Any, asked: Common) -> None:
        """Compile what the answer to a request must match, outside the event loop; the engine keeps it for submit().

        Raises ApiError: 400 for what cannot be compiled, 503 if the threads are busy with others.
        """
        given = asked.constraint()
        if not given:
            return
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                await asyncio.get_running_loop().run_in_executor(self._threads, partial(engine.constraint, **given))
        except UnsupportedError as error:
            raise ApiError(400, str(error)) from error
        except TimeoutError:
            raise unavailable("the schemas of other requests keep the server busy", RETRY) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
