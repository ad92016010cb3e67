"""One pair of ranks and one model for all tests of this folder: starting ranks is what takes time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks
from .tensor_jobs import save_llama


@pytest.fixture(scope="package")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama. Rows of its linears have biases, so that it shows who adds them."""
    return save_llama(tmp_path_factory.mktemp("llama"), attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as pair:
        yield pair
