"""Every kernel is tested on every instruction set that this machine and build have."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.kernels.cpu import refusal, using_isa
from hf_accel.kernels.cpu.build import levels_for


@pytest.fixture(params=levels_for(platform.machine()))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from running_level(request.param)


def running_level(level: str) -> Iterator[str]:
    """For a fixture: the kernels are those of this level meanwhile. Skips a test where that cannot be."""
    if reason := refusal():
        pytest.skip(reason)
    try:
        context = using_isa(level)
        context.__enter__()
    except UnsupportedError as error:
        pytest.skip(str(error))
    yield level
    context.__exit__(None, None, None)
