"""The real client of the server that a file of tests runs."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from .running import Running, until


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with running.client() as client:
        yield client
    until(running.is_idle)
