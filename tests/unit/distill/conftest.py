"""Each training collects garbage several times, among all objects of torch and transformers: these are set aside."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def _frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
