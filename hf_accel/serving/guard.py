"""The outermost layer of the server, in plain ASGI: it checks hosts, keys and sizes, and sees clients leave."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import UnsupportedError
from ..keywords import known_keywords
from .api_errors import ApiError
from .http_server import CONNECTION, KEEP_ALIVE_SECONDS, Connection
from .models import Models
from .page import FILES
from .service import exchange

# They need no key: they are for what starts and stops the server, they say which routes there are, and the page has a
# field for the key.
OPEN_PATHS = ("/health", "/ready", "/openapi.json", *FILES)
BODY_SECONDS = 30.0  # how long a client may take to send a body
MOST_HEADERS = 100
CLOSE = {"Connection": "close"}
REQUEST_ID = "x-request-id"
LONGEST_ID = 128  # characters
ANSWER = "answer"  # the key in the scope's state under which the guard finds its own answer
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY = "*"
ORIGIN = re.compile(r"https?://[^/?#\s]+")


class ClientGone(Exception):
    """The client closed the connection before it had sent the whole body."""


class Guard:
    """Lets requests pass to `app`.

    Answers 421 to requests for other hosts than `hosts` if there is no key, 401 without the key, 431 for too many
    headers, 413 for a body that is too large, and 408 for one that does not come. When the client closes the
    connection, the work on its request is cancelled, streamed or not; and when an exchange ends, however it ends, its
    job is closed.
    paths: the most bytes of a body, by the path; other paths are one in the metrics.
    origins: whose pages a browser lets read the answers, refusals too. A browser asks for that without a key, by an
    OPTIONS request, which is answered before hosts and keys are checked: it says nothing but who may ask.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        *,
        api_key: str | None,
        hosts: Hosts | None,
        origins: Collection[str] = (),
        paths: Mapping[str, int],
    ) -> None:
        self._app, self._models, self._paths = app, models, paths
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._hosts = hosts if api_key is None else None
        self._exchanges: ASGIApp = _for_pages_of(origins, self._answered) if origins else self._answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send, self._models)
        state = scope.setdefault("state", {})
        connection: Connection | None = state.pop(CONNECTION, None)
        state |= {ANSWER: answer, "request_id": answer.request_id}
        if connection is not None:
            connection.request_came()
        try:
            await self._exchanges(scope, receive, answer)
        except ClientGone:
            pass
        finally:
            if connection is not None:
                connection.answered()
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._models.metrics.requests.labels(path, str(answer.status or 499)).inc()

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._exchange(scope, receive, send)
        except ApiError as error:
            if scope["state"][ANSWER].status is None:
                await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        # The body of a refused request is read too, or the client would lose the answer while it sends.
        try:
            body = await asyncio.wait_for(self._body(scope, receive, keep=refusal is None), BODY_SECONDS)
        except TimeoutError:
            message = f"the body did not come within {BODY_SECONDS:.0f} seconds"
            raise ApiError(408, message, headers=CLOSE) from None
        if refusal is not None:
            raise refusal
        with ExitStack() as stack:
            exchange.set(stack)
            await self._run(scope, body, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return the answer to a request that is refused whatever its body is; None if it is not refused."""
        if len(scope["headers"]) > MOST_HEADERS:
            return ApiError(431, f"the request has more than {MOST_HEADERS} headers", headers=CLOSE)
        for name, value in scope["headers"]:
            reason = self._hosts.refuses(value) if self._hosts is not None and name == b"host" else None
            if reason is not None:
                return ApiError(421, reason)
        return self._wrong_key(scope)

    def _wrong_key(self, scope: Scope) -> ApiError | None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return None
        given = _header(scope, b"authorization") or b""
        if hmac.compare_digest(given, self._key):
            return None
        message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, scope: Scope, receive: Receive, *, keep: bool) -> bytes:
        """Read the whole body. One that is too large is read on, but not kept, so that the client gets its answer."""
        most = self._paths.get(scope["path"], self._models.least_body_bytes)
        refusal = ApiError(413, f"the body is larger than {most} bytes", headers=CLOSE)
        stated = _header(scope, b"content-length")
        if stated is not None and stated.isdigit() and len(stated) < 20 and int(stated) > 16 * most:
            raise refusal
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= most and keep:
                parts.append(part)
            elif size > 16 * most:
                break
        if size > most:
            raise refusal
        return b"".join(parts)

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the app until it has answered or the client is gone, whichever comes first."""

        async def answered() -> None:
            await self._app(scope, _replayed(body), send)

        app = asyncio.create_task(answered())
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({app, gone}, return_when=asyncio.FIRST_COMPLETED)
            if app.done():
                app.result()
        finally:
            for task in (app, gone):
                task.cancel()
            await asyncio.gather(app, gone, return_exceptions=True)


class _Answer:
    """Sends the answer, with the request's id and a header about the connection, and remembers its status."""

    def __init__(self, scope: Scope, send: Send, models: Models) -> None:
        self._send, self._models = send, models
        self.status: int | None = None
        given = (_header(scope, REQUEST_ID.encode()) or b"").decode("latin-1")
        is_usable = 0 < len(given) <= LONGEST_ID and given.isascii() and given.isprintable()
        self.request_id = given if is_usable else uuid.uuid4().hex

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (REQUEST_ID.encode(), self.request_id.encode())]
            message["headers"] = [*headers, *self._about_connection(headers)]
        await self._send(message)

    def _about_connection(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the header that announces the end of the connection, or how long it is kept, for clients that read
        it.
        """
        if any(name.lower() == b"connection" for name, _ in headers):
            return []
        if self._models.draining:
            return [(b"connection", b"close")]
        return [(b"keep-alive", b"timeout=%d" % (KEEP_ALIVE_SECONDS - 5))]


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _replayed(body: bytes) -> Receive:
    """Return the app's next message: the body once, and then nothing, because the guard watches the connection."""
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        found: Message = messages.pop()
        return found

    return receive


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- pages of others ----------------------------------------------------------------------------------


def _for_pages_of(origins: Collection[str], app: ASGIApp) -> ASGIApp:
    """Let pages of these origins read what `app` answers, also where they are public and this server is not."""
    given = {"allow_methods": ("GET", "POST"), "allow_headers": ("*",), "allow_private_network": True}
    exposed = (REQUEST_ID, "retry-after")
    return CORSMiddleware(
        app, allow_origins=origins, expose_headers=exposed, **known_keywords(CORSMiddleware.__init__, given)
    )


def checked_origin(given: str) -> str:
    """Return an origin as browsers write it, or "*". Raises UnsupportedError for anything else."""
    origin = given.strip().lower().removesuffix("/")
    if origin != ANY and not ORIGIN.fullmatch(origin):
        raise UnsupportedError(f"allow_origin={given!r} is no origin, which is as https://chat.example:3000, or '*'")
    return origin


# -- hosts --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """The Hosts that requests may name.

    A browser lets a web page read what its own host answers, and the owner of evil.example can let that name point at
    127.0.0.1 (DNS rebinding). A request then comes from this machine, but its Host header still says evil.example.

    names: in lower case, without ports. addresses: whether any IP address is taken too, as no DNS points it elsewhere.
    """

    names: frozenset[str]
    addresses: bool = False

    @classmethod
    def of(cls, host: str, allowed: Iterable[str] = (), *, origins: Iterable[str] = ()) -> Hosts:
        """Make the Hosts of a server that listens on `host`, with those that the user allows; "*" allows all.

        origins: whose pages may ask; they may do so by their own host's name, behind a proxy. "*" adds no name.
        """
        trusted = (origin.partition("://")[2] for origin in origins if origin != ANY)
        names = {*LOOPBACK, host_name(host), *map(host_name, allowed), *map(host_name, trusted)}
        is_wildcard = _is_address(host) and ipaddress.ip_address(host).is_unspecified
        if is_wildcard:
            names.add(socket.gethostname().lower())
        return cls(frozenset(names), is_wildcard)

    def refuses(self, header: bytes) -> str | None:
        """Return why a request with this Host header is not answered, or None."""
        name = host_name(header.decode("latin-1"))
        if ANY in self.names or name in self.names or (self.addresses and _is_address(name)):
            return None
        known = ", ".join(sorted(self.names))
        return (
            f"without an API key this server answers requests to {known}, not to {name[:100]!r}; start it with "
            "--allow-host NAME, or with --api-key"
        )


def host_name(host: str) -> str:
    """Return a Host header, or a host, without its port: 'LocalHost:8000' is 'localhost', '[::1]:8000' is '::1'."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host.partition(":")[0] if host.count(":") == 1 else host
    return name.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
