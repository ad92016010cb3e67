"""Limits of the server, and the count of its work: which requests are accepted, and which must come later."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol

from ..errors import UnsupportedError
from .api_errors import ApiError, unavailable

LONGEST_RETRY = 60  # seconds that a client is asked to wait at most
MEMORY = 0.9  # how much of the mean time of a choice comes from those before the last one


def least_of(name: str) -> int:
    """Return the least that a number of Limits may be."""
    return 0 if name == "max_queue" else 1


@dataclass(frozen=True)
class Limits:
    """The most that one client may ask for, and the number of requests at a time.

    max_running: the choices (n of each request) that are computed at the same time. max_queue: how many more may
    wait; the next request gets 429. max_prompt_tokens, max_new_tokens: of each choice; None leaves them to the model's
    context. max_body_bytes: of a request's body. max_choices: the choices of one request. max_images,
    max_image_pixels: the images of one request, and the pixels of each. image_hosts: the names of hosts from which the
    server fetches images that messages name; "*" is any. adapter_folder: the folder in which are the adapters that a
    client may load; None lets no client load any. ignore_unknown_fields: whether a field of a body that this server
    does not know is left out; else its request is refused.
    """

    max_running: int = 64
    max_queue: int = 256
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_body_bytes: int = 2**20
    max_choices: int = 16
    max_images: int = 16
    max_image_pixels: int = 2**25
    image_hosts: tuple[str, ...] = ()
    adapter_folder: Path | None = None
    ignore_unknown_fields: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < least_of(name):
                raise UnsupportedError(f"{name}={value} must be at least {least_of(name)}")

    @property
    def most_choices(self) -> int:
        """The choices of one request that can ever be admitted."""
        return min(self.max_choices, self.max_running + self.max_queue)

    @property
    def most_connections(self) -> int:
        """The connections that may be open at a time: for all requests that may run or wait, and as many that are
        refused.
        """
        return 2 * (self.max_running + self.max_queue)


class Inside(Protocol):
    """A request that was admitted. cancel: ends it before its time."""

    num_choices: int
    since: float

    def cancel(self) -> None: ...


class Admission:
    """Admits requests while there is room, and waits for those inside when the server ends.

    All methods are for one event loop, so that nothing is locked.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.draining = False
        self._inside: set[Inside] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._mean_seconds = 1.0  # of a choice

    @property
    def num_choices(self) -> int:
        """The choices that run or wait now."""
        return sum(one.num_choices for one in self._inside)

    def admit(self, one: Inside) -> None:
        """Let a request in. Raises ApiError: 503 while the server ends, 400 for too many choices, 429 if full."""
        self.require_room(one.num_choices)
        self._inside.add(one)
        self._empty.clear()

    def require_room(self, num_choices: int) -> None:
        """Raise what admit() would raise."""
        limits = self.limits
        self.refuse_while_draining()
        if num_choices > limits.most_choices:
            message = f"{num_choices} choices are asked for; this server computes {limits.most_choices} a request"
            raise ApiError(400, message, field="n")
        if self.num_choices + num_choices > limits.max_running + limits.max_queue:
            message = f"{self.num_choices} choices run or wait, and no more may; try again later"
            raise ApiError(429, message, headers={"Retry-After": str(self.retry_seconds())})

    def refuse_while_draining(self) -> None:
        if self.draining:
            raise unavailable("the server is shutting down; try another one", LONGEST_RETRY)

    def leave(self, one: Inside) -> None:
        """Give the place back."""
        self._inside.remove(one)
        self._mean_seconds = MEMORY * self._mean_seconds + (1 - MEMORY) * (monotonic() - one.since)
        if not self._inside:
            self._empty.set()

    def retry_seconds(self) -> int:
        """Return the seconds until the requests that wait now have begun, estimated from the requests so far."""
        waiting = max(1, self.num_choices - self.limits.max_running)
        seconds = math.ceil(self._mean_seconds * waiting / self.limits.max_running)
        return max(1, min(LONGEST_RETRY, seconds))

    async def drain(self, seconds: float) -> bool:
        """Admit nobody, and wait until all have left. Returns False if some were cancelled after `seconds`."""
        self.draining = True
        if self._empty.is_set():
            return True
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            self.cancel_all()
            return False
        return True

    def cancel_all(self) -> None:
        for one in list(self._inside):
            one.cancel()
