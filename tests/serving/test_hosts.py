"""Names that a server without a key answers to: those of the address that it listens on, and no other site's."""

from __future__ import annotations

import socket

import pytest

from hf_accel.serving.guard import Hosts

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


def test_all_hosts_may_be_allowed() -> None:
    assert Hosts.of("127.0.0.1", ["*"]).refuses(b"evil.example") is None
