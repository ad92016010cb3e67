"""Names that a server without a key answers to: those of the address that it listens on, and no other site's."""

from __future__ import annotations

import socket

import pytest

from hf_accel.errors import UnsupportedError
from hf_accel.serving.guard import Hosts, checked_origin

ALWAYS = [
    "localhost",
    "localhost:8000",
    "LOCALHOST:1",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:8000",
    "[::1]",
    "[::1]:80",
]
NEVER = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[x]:1"]


@pytest.mark.parametrize(
    ("host", "allowed", "taken", "refused"),
    [
        ("127.0.0.1", [], [], ["192.0.2.1", "my-machine"]),
        ("localhost", [], [], ["192.0.2.1"]),
        ("192.0.2.1", [], ["192.0.2.1", "192.0.2.1:8000"], ["192.0.2.2"]),
        ("my-machine", [], ["my-machine:8000"], ["my-machine.evil.example"]),
        ("2001:db8::1", [], ["[2001:db8::1]:8000"], ["[2001:db8::2]"]),
        ("0.0.0.0", [], ["192.0.2.1:8000", "[2001:db8::1]", socket.gethostname()], ["my-machine"]),
        ("::", [], ["192.0.2.1"], ["my-machine"]),
        ("127.0.0.1", ["My-Machine", "10.0.0.1:80"], ["my-machine:8000", "10.0.0.1"], ["192.0.2.1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_hosts(host: str, allowed: list[str], taken: list[str], refused: list[str]) -> None:
    hosts = Hosts.of(host, allowed)
    for name in (*ALWAYS, *taken):
        assert hosts.refuses(name.encode()) is None, name
    for name in (*NEVER, *refused):
        assert "--allow-host" in (hosts.refuses(name.encode()) or ""), name


def test_hosts_of_allowed_origins() -> None:
    hosts = Hosts.of("127.0.0.1", origins=["https://chat.example:3000", "*"])
    assert hosts.refuses(b"chat.example:8000") is None and hosts.refuses(b"localhost") is None
    assert hosts.refuses(b"evil.example") and hosts.refuses(b"x.chat.example")


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("*", "*"),
        ("HTTP://LocalHost:3000", "http://localhost:3000"),
        ("https://chat.example/", "https://chat.example"),
    ],
)
def test_origins(given: str, origin: str) -> None:
    assert checked_origin(given) == origin


@pytest.mark.parametrize(
    "given", ["chat.example", "https://chat.example/page", "null", "", "ftp://x", "https://*.x/?a"]
)
def test_what_is_no_origin(given: str) -> None:
    with pytest.raises(UnsupportedError, match="is no origin"):
        checked_origin(given)


def test_all_hosts_may_be_allowed() -> None:
    assert Hosts.of("127.0.0.1", ["*"]).refuses(b"evil.example") is None
