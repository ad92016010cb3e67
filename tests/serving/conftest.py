"""The real client of the server that a file of tests runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import openai
import pytest

from .running import Running, until


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with running.client() as client:
        yield client
    until(running.is_idle)


@pytest.fixture
def in_turns(running: Running) -> Callable[[Callable[[], Iterable[Any]]], list[Any]]:
    """Ask for a stream and read it, while each pass waits until the last chunk was read.

    Without this, the number of chunks depends on who is faster: tokens that are there go out together.
    """
    batcher = running.service.engine.loop.batcher
    step = batcher.step

    def read(ask: Callable[[], Iterable[Any]]) -> list[Any]:
        found, chunks_read = [], threading.Semaphore(1)

        def next_step() -> Any:
            chunks_read.acquire(timeout=0.1)  # a pass may give no chunk: of half a character, for one
            return step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batcher, "step", next_step)
            for chunk in ask():
                found.append(chunk)
                chunks_read.release()
        return found

    return read
