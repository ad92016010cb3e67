"""The process: a socket, uvicorn, and an end that lets running requests finish."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .connection import HEAD_BYTES, Connections
from .guard import KEEP_ALIVE_SECONDS
from .service import Service

CLOSE_SECONDS = 5  # for connections to close once all requests have ended


class DrainingServer(uvicorn.Server):
    """uvicorn's server; at the first SIGTERM or SIGINT it refuses new requests with 503 and lets the others finish.

    drain_seconds: how long they may take; those that run on are cancelled. A second signal cancels them at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, *, drain_seconds: float) -> None:
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds
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
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._service.admission.cancel_all()

    async def _drain(self) -> None:
        await self._service.admission.drain(self._drain_seconds)
        self._service.templates.close()
        self.should_exit = True


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded, so that a port in use is known at once. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def make_server(
    app: ASGIApp, service: Service, *, drain_seconds: float, log_level: str = "warning", http: Any = AutoHTTPProtocol
) -> DrainingServer:
    """A server for an application of `make_app`; run(sockets=[...]) serves until a signal. http: uvicorn's parser."""
    connections = Connections(service.limits.most_connections, 32 * service.limits.max_body_bytes)
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
    return DrainingServer(config, service, drain_seconds=drain_seconds)
