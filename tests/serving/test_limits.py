"""Admission: who comes in, who is told to come later, and how a server waits for its last requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.serving.api_errors import ApiError
from hf_accel.serving.limits import LONGEST_RETRY, Admission, Limits


@dataclass(eq=False)
class One:
    num_choices: int
    since: float = 0.0
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_places() -> None:
    admission = Admission(Limits(max_running=2, max_queue=3))
    inside = [One(2, monotonic()), One(3, monotonic())]
    for one in inside:
        admission.admit(one)
    with pytest.raises(ApiError, match="5 choices run or wait") as error:
        admission.admit(One(1))
    assert error.value.status == 429 and 1 <= int(error.value.headers["Retry-After"]) <= LONGEST_RETRY
    admission.leave(inside[0])
    with pytest.raises(ApiError, match="3 choices run or wait"):
        admission.admit(One(3))
    admission.admit(One(2))
    assert admission.num_choices == 5


def test_more_than_there_are_places_at_all() -> None:
    admission = Admission(Limits(max_running=2, max_queue=1))
    with pytest.raises(ApiError, match="computes 3 a request") as error:
        admission.admit(One(4))
    assert error.value.status == 400


def test_the_time_to_wait_follows_what_requests_take() -> None:
    admission = Admission(Limits(max_running=1, max_queue=100))
    for _ in range(60):
        one = One(1, since=monotonic() - 4.0)
        admission.admit(one)
        admission.leave(one)
    for _ in range(4):
        admission.admit(One(1))
    assert admission.retry_seconds() == 12  # three wait, of 4 seconds each


def test_drain() -> None:
    async def run() -> None:
        admission, one = Admission(Limits()), One(1, monotonic())
        assert await admission.drain(0)
        with pytest.raises(ApiError, match="shutting down") as error:
            admission.admit(one)
        assert error.value.status == 503 and error.value.headers["Retry-After"]
        admission.draining = False
        admission.admit(one)
        assert not await admission.drain(0.01) and one.is_cancelled
        asyncio.get_running_loop().call_later(0.01, admission.leave, one)
        assert await admission.drain(30)

    asyncio.run(run())


@pytest.mark.parametrize(("name", "value"), [("max_running", 0), ("max_queue", -1), ("max_body_bytes", 0)])
def test_bad_limits(name: str, value: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}={value} must be at least"):
        Limits(**{name: value})
