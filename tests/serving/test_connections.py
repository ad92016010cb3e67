"""Connections that send too much, too slowly or nothing, by raw sockets and with both of uvicorn's HTTP parsers."""

from __future__ import annotations

import asyncio
import importlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hf_accel.serving import http_server
from hf_accel.serving.guard import Guard
from hf_accel.serving.http_server import HEAD_BYTES, KEEP_ALIVE_SECONDS, bound_socket, make_server
from hf_accel.serving.limits import Admission, Limits
from hf_accel.serving.metrics import Metrics
from hf_accel.serving.models import Models

from .running import until

LIMITS = Limits(max_running=2, max_queue=1, max_body_bytes=2**18)
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 200000\r\n\r\n"


class Served:
    """A server whose application tells how long a body is; GET /wait is answered after go()."""

    def __init__(self, http: Any, api_key: str | None) -> None:
        self._go = threading.Event()
        self.waiting = 0
        self.service: Any = SimpleNamespace(
            name="none", limits=LIMITS, admission=Admission(LIMITS), templates=SimpleNamespace(close=lambda: None),
            metrics=Metrics(SimpleNamespace(stats={}, is_live=True), "none"),
        )  # fmt: skip
        models = Models([self.service])
        app = Starlette(routes=[Route("/", self._size, methods=["GET", "POST"]), Route("/wait", self._wait)])
        guard = Guard(app, models, api_key=api_key, hosts=None, paths={})
        self.server = make_server(guard, models, drain_seconds=1, log_level="critical", http=http)
        bound = bound_socket("127.0.0.1", 0)
        self.port = bound.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [bound]})
        self.thread.start()
        until(lambda: self.server.started)

    async def _size(self, request: Request) -> Response:
        return Response(str(len(await request.body())))

    async def _wait(self, _: Request) -> Response:
        self.waiting += 1
        while not self._go.is_set():
            await asyncio.sleep(0.005)
        return Response("waited")

    def go(self) -> None:
        self._go.set()

    def connect(self, *parts: bytes) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        for part in parts:
            found.sendall(part)
        return found

    def end(self) -> None:
        self.go()
        self.server.handle_exit(15, None)
        self.thread.join(30)
        assert not self.thread.is_alive()


def answer(sent: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    while part := sent.recv(2**16):
        found += part
    return found


def one_answer(sent: socket.socket) -> bytes:
    """The next answer on a connection that stays open; this application states the length of each."""
    found = b""
    head = body = b""
    while not head or len(body) < int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]):
        part = sent.recv(2**16)
        assert part, f"the connection was closed after {found!r}"
        found += part
        head, _, body = found.partition(b"\r\n\r\n") if b"\r\n\r\n" in found else (b"", b"", b"")
    return found


def status(found: bytes) -> int:
    assert found.startswith(b"HTTP/1.1 "), found
    return int(found[9:12])


@pytest.fixture(scope="module", params=["h11_impl:H11Protocol", "httptools_impl:HttpToolsProtocol"])
def http(request: pytest.FixtureRequest) -> Any:
    module, _, name = request.param.partition(":")
    pytest.importorskip(module.removesuffix("_impl"))
    return getattr(importlib.import_module(f"uvicorn.protocols.http.{module}"), name)


@pytest.fixture
def served(http: Any) -> Iterator[Served]:
    found = Served(http, None)
    yield found
    found.end()


@pytest.mark.parametrize(
    "head",
    [
        [b"GET / HTTP/1.1\r\nx: " + b"y" * 2**20],
        [b"GET /", *[b"x" * 10_000] * 20],
        [b"\r\n\r\n", GET[:-2], *[b"x: " + b"y" * 1000 + b"\r\n"] * 100],
        [GET[:-2] + b"x: " + b"y" * HEAD_BYTES + b"\r\n\r\n"],
        [GET[:-2] + b"".join(b"x%d: y\r\n" % number for number in range(200)) + b"\r\n"],
    ],
    ids=["one header", "a path", "after empty lines", "a whole head", "many headers"],
)
def test_a_head_that_is_too_long(served: Served, head: list[bytes]) -> None:
    with served.connect(*head) as sent:
        assert status(answer(sent)) == 431


def test_a_head_that_is_long_is_taken(served: Served) -> None:
    head = GET[:-2] + b"x: " + b"y" * (HEAD_BYTES - 100) + b"\r\nconnection: close\r\n\r\n"
    for cut in (len(head) - 1, len(head) - 3, 5, 20_000):
        with served.connect(head[:cut]) as sent:
            sent.sendall(head[cut:])
            assert status(answer(sent)) == 200


def test_a_head_that_does_not_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.05)
    with served.connect() as silent, served.connect(GET[:-5]) as slow, served.connect(GET) as kept:
        assert answer(silent) == b""
        assert status(answer(slow)) == 408
        assert status(one_answer(kept)) == 200
        kept.sendall(GET[:9])  # of the next request on the same connection
        assert status(answer(kept)) == 408


def test_silent_connections_give_way(served: Served) -> None:
    """Ten times as many as are taken: each new one gets the place of the oldest, and is served."""
    with ExitStack() as closing:
        silent = [closing.enter_context(served.connect()) for _ in range(10 * LIMITS.most_connections)]
        with served.connect(GET) as sent:
            assert status(one_answer(sent)) == 200
        assert [one.recv(1) for one in silent[: -LIMITS.most_connections]] == [b""] * 9 * LIMITS.most_connections
    until(lambda: not served.server.server_state.connections)


def test_more_clients_than_are_taken(served: Served) -> None:
    busy = [served.connect(GET.replace(b"/ ", b"/wait ", 1)) for _ in range(LIMITS.most_connections)]
    until(lambda: served.waiting == LIMITS.most_connections)
    with served.connect(GET) as one_more:
        assert status(answer(one_more)) == 503
    served.go()
    for one in busy:
        assert status(one_answer(one)) == 200
        one.close()


def test_requests_one_after_the_other(served: Served) -> None:
    """Together in one packet, and with bodies that are longer than a head may be."""
    whole = POST + b"x" * 200_000
    with served.connect(
        whole + GET + whole, whole, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    ) as sent:
        found = answer(sent)
        assert found.count(b"HTTP/1.1 200 ") == 5 and found.count(b"\r\n\r\n200000") == 3


def test_the_next_head_is_bounded_while_a_request_is_answered(served: Served) -> None:
    """The connection is closed, or no longer read: h11 reads nothing before its answer."""
    with served.connect(GET.replace(b"/ ", b"/wait ", 1)) as sent:
        until(lambda: served.waiting == 1)
        sent.settimeout(0.5)
        with pytest.raises(OSError):
            while True:
                sent.sendall(b"GET /" + b"x" * 100_000)


def test_what_follows_a_body_is_bounded(served: Served) -> None:
    """Trailers of a body in chunks."""
    chunked = GET.replace(b"GET", b"POST")[:-2] + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    with served.connect(chunked) as sent, pytest.raises(OSError):
        for _ in range(64 * LIMITS.max_body_bytes // 10_000):
            sent.sendall(b"x: " + b"y" * 9_995 + b"\r\n")


def test_a_refused_body_is_read(http: Any) -> None:
    """Without the key: the client gets its answer, and keeps its connection."""
    served = Served(http, "secret")
    try:
        with served.connect(POST.replace(b"POST / ", b"POST /other ")) as sent:
            for _ in range(200):
                sent.sendall(b"x" * 1000)
            assert status(one_answer(sent)) == 401
            sent.sendall(GET.replace(b"GET / ", b"GET /health "))
            assert status(one_answer(sent)) == 404
    finally:
        served.end()


def test_clients_close_connections_and_not_the_server(served: Served) -> None:
    """A connection that the server closes may carry a request already, so it keeps them for longer than clients do."""
    assert served.server.config.timeout_keep_alive == KEEP_ALIVE_SECONDS > 90
    assert httpx.Client()._transport._pool._keepalive_expiry < KEEP_ALIVE_SECONDS  # type: ignore[attr-defined]
    with served.connect(GET) as sent:
        assert b"keep-alive: timeout=115\r\n" in one_answer(sent)
        served.service.admission.draining = True
        sent.sendall(GET)
        last = answer(sent)
        assert status(last) == 200 and b"connection: close\r\n" in last
