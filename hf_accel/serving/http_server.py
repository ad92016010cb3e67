"""The process: a socket, uvicorn, and an end that lets running requests finish.

The head of a request is bounded in bytes and in seconds, and connections in number. uvicorn's parsers (h11, httptools)
bound neither in the same way, so it is done before they see a byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
from collections.abc import Callable
from http import HTTPStatus
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .api_errors import error_body
from .models import Models

HEAD_BYTES = 2**16  # of a request: its first line and its headers
HEAD_SECONDS = 30.0  # from a connection to its first head, and from the first byte of a head to the last one
LINGER_SECONDS = 2.0  # a refused client may send on, or it would lose the answer with the connection
CONNECTION = "connection"  # the key in the scope's state under which the guard finds the connection
_END = re.compile(rb"\n\r?\n")
# How long a connection is kept for the next request. Clients keep theirs for less (httpx and OpenAI's client 5 s,
# nginx and .NET 60, Go 90), so that it is they who close it: one that the server closes may carry a request already.
KEEP_ALIVE_SECONDS = 120
CLOSE_SECONDS = 5  # for connections to close once all requests have ended


# -- the server ---------------------------------------------------------------------------------------


class DrainingServer(uvicorn.Server):
    """uvicorn's server; at the first SIGTERM or SIGINT it refuses new requests with 503 and lets the others finish.

    drain_seconds: how long they may take; those that run on are cancelled. A second signal cancels them at once.
    """

    def __init__(self, config: uvicorn.Config, models: Models, *, drain_seconds: float) -> None:
        super().__init__(config)
        self._models, self._drain_seconds = models, drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. uvicorn calls this for a signal; other threads may call it too."""
        if self._loop is None:  # it has not started to serve
            self.should_exit = True
        else:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._models.cancel_all()

    async def _drain(self) -> None:
        await self._models.drain(self._drain_seconds)
        self.should_exit = True


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded, so that a port in use is known at once. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # Windows would give two servers the same port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def make_server(
    app: ASGIApp,
    models: Models,
    *,
    drain_seconds: float,
    log_level: str = "warning",
    http: Any = AutoHTTPProtocol,
) -> DrainingServer:
    """A server for an application of `make_app`; run(sockets=[...]) serves until a signal. http: uvicorn's parser."""
    connections = Connections(models.most_connections, 32 * models.most_body_bytes)
    bounded: Any = connections.protocol(http)
    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        http=bounded,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        h11_max_incomplete_event_size=2 * HEAD_BYTES,  # so that our own limit, and its answer, come first
        lifespan="on",
    )
    return DrainingServer(config, models, drain_seconds=drain_seconds)


# -- connections --------------------------------------------------------------------------------------


class Connections:
    """The connections of a server.

    most: the number that may be open at a time. body_bytes: the most bytes of a request after its head.

    If all are taken, the one that has waited longest for a request is closed for the next client.
    """

    def __init__(self, most: int, body_bytes: int) -> None:
        self.most, self.body_bytes = most, body_bytes
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}  # for the head of a request, the longest wait first

    def protocol(self, parser: Callable[..., asyncio.Protocol]) -> Callable[..., asyncio.Protocol]:
        """Return the factory with which uvicorn makes the protocol of a connection. parser: uvicorn's own."""

        def make(*, app_state: dict[str, Any], **settings: Any) -> asyncio.Protocol:
            connection = Connection(self)
            connection.inner = parser(app_state={**app_state, CONNECTION: connection}, **settings)
            return connection

        return make

    def enter(self, connection: Connection) -> bool:
        """Return whether there is room for a connection."""
        if len(self.open) >= self.most and self.waiting:
            next(iter(self.waiting)).close()
        if len(self.open) >= self.most:
            return False
        self.open.add(connection)
        return True

    def leave(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.waiting.pop(connection, None)


class Connection(asyncio.Protocol):
    """Passes a client's bytes on to uvicorn's protocol, unless a head has too many bytes or takes too long.

    The guard says when a request is answered, by `request_came` and `answered`.
    """

    inner: asyncio.Protocol

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._in_head = True
        self._size = 0  # bytes of the head or, after it, of the body
        self._last = b""  # bytes of the head, in which its end may have begun
        self._timer: asyncio.TimerHandle | None = None
        self._is_known = self._is_over = False

    # -- the guard -------------------------------------------------------------------------------------

    def request_came(self) -> None:
        """Note that a head was understood, and its request is about to be answered."""
        self._leave_head(0)

    def answered(self) -> None:
        """Note that the answer was given: the next request may come, and until then this connection may be closed."""
        self._in_head, self._size, self._last = True, 0, b""
        if not self._is_over:
            self._connections.waiting[self] = None

    # -- asyncio ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._connections.enter(self):
            self._refuse(503, "this server has as many connections as it takes; try again later")
            return
        self._is_known = True
        self._connections.waiting[self] = None
        self._wait_for_head()
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._in_head:
            data = self._count_head(data)
        else:  # a body, or the requests after this one, which clients seldom send before its answer
            self._size += len(data)
            if self._size > self._connections.body_bytes:
                self.close()
        if data and not self._is_over:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._is_over else self.inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._is_over = True
        self._connections.leave(self)
        if self._is_known:
            self.inner.connection_lost(error)

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    # -- heads -----------------------------------------------------------------------------------------

    def _count_head(self, data: bytes) -> bytes:
        """Count the bytes of a head, and return them without the empty lines before it, which are no part of it."""
        if not self._size:
            data = data.lstrip(b"\r\n")
            if not data:
                return data
            self._wait_for_head()
        seen = self._last + data
        end = _END.search(seen)
        size = self._size + (len(data) if end is None else end.end() - len(self._last))
        if size > HEAD_BYTES:
            self._refuse(431, f"the headers have more than {HEAD_BYTES} bytes")
        elif end is None:
            self._size, self._last = size, seen[-2:]
        else:
            self._leave_head(len(seen) - end.end())
        return data

    def _leave_head(self, body_bytes: int) -> None:
        self._in_head, self._size = False, body_bytes
        self._stop_timer()
        self._connections.waiting.pop(self, None)

    def _wait_for_head(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._size:
            self._refuse(408, f"the headers did not come within {HEAD_SECONDS:g} seconds")
        else:
            self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        self._connections.leave(self)
        self._is_over = True
        self._transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer instead of the parser, and close when the client has had time to read the answer."""
        self._is_over = True
        self._stop_timer()
        body = json.dumps(error_body(status, message)).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + body)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.close)
