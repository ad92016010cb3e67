"""The host names that a server without an API key answers to: a web page must not reach it by a name of its own."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY = "*"


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
    def of(cls, host: str, allowed: Iterable[str] = ()) -> Hosts:
        """Make the Hosts of a server that listens on `host`, with those that the user allows; "*" allows all."""
        names = {*LOOPBACK, host_name(host), *map(host_name, allowed)}
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
