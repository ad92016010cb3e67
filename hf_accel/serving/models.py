"""The models of a server by their names: which of them a request is for, and their end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UnsupportedError
from .api_errors import ApiError
from .metrics import ServerMetrics
from .service import ModelService, Service

Answering = TypeVar("Answering")


class Models:
    """The services of one server. Each has its own limits, queue and engine, so that none waits for another.

    All methods but those of adapters are for the event loop of the server. Raises UnsupportedError for two services of
    one name.
    """

    def __init__(self, services: Sequence[ModelService]) -> None:
        self.services = tuple(services)
        for service in self.services:
            if sum(service.name == each.name for each in self.services) > 1:
                raise UnsupportedError(f"two models have the name {service.name!r}; give one of them another name")
        self.metrics = ServerMetrics(service.metrics for service in self.services)
        self._loading = threading.Lock()

    # -- which one -------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names that clients may ask for: of models, each with those of its adapters."""
        return [name for service in self.services for name in service.names]

    def named(self, name: str) -> ModelService | None:
        """Return the service of a model or of an adapter; None if it is not here."""
        return next((service for service in self.services if name in service.names), None)

    def require_named(self, name: str) -> ModelService:
        """Return the service of a model or of an adapter. Raises ApiError (404) if it is not here."""
        service = self.named(name)
        if service is None:
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here, but {_these(self.names)}", field="model"
            )
        return service

    def chosen(self, answering: Mapping[str, Answering], asked: Any) -> Answering:
        """Return what answers for the model that a request names, of `answering`, by the names of models.

        Where one model answers, none has to be named. Raises ApiError: 404 for a model that is not here or does not
        answer, 400 if several could.
        """
        if isinstance(asked, str):
            service = self.require_named(asked)
            if service.name not in answering:
                known = _these(answering)
                raise ApiError(404, f"the model {asked[:200]!r} does not answer here, but {known}", field="model")
            return answering[service.name]
        if asked is None and len(answering) > 1:
            raise ApiError(400, f"the request names no model, and {_these(answering)} served here", field="model")
        return next(iter(answering.values()))  # whose check refuses what is no name

    # -- adapters --------------------------------------------------------------------------------------

    @property
    def writing(self) -> dict[str, Service]:
        """The services of models that write text, which can have adapters, by their names."""
        return {one.name: one for one in self.services if isinstance(one, Service)}

    def load_adapter(self, name: str, path: str | Path, *, model: str) -> None:
        """Load an adapter that clients can ask for as a model. Any thread may call this. Raises UnsupportedError."""
        with self._loading:  # or two models could get adapters of one name
            if name in self.names:
                raise UnsupportedError(
                    f"an adapter cannot have the name {name!r}, which a model or an adapter has here; give it another "
                    "one, or unload that adapter"
                )
            self.writing[model].engine.load_adapter(name, path)

    # -- their state -----------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """True while any model can answer: one whose engine has ended takes no other with it."""
        return any(service.engine.is_live for service in self.services)

    def unready(self) -> dict[str, str]:
        """Return why models take no request now, by their names; those that take requests are left out."""
        reasons = ((service.name, service.unready()) for service in self.services)
        return {name: reason for name, reason in reasons if reason is not None}

    @property
    def draining(self) -> bool:
        return any(service.admission.draining for service in self.services)

    @property
    def most_connections(self) -> int:
        """The connections that may be open at a time."""
        return sum(service.limits.most_connections for service in self.services)

    @property
    def most_body_bytes(self) -> int:
        """The bytes of the largest body that any model takes."""
        return max(service.limits.max_body_bytes for service in self.services)

    @property
    def least_body_bytes(self) -> int:
        """The bytes that a body may have which is for no model."""
        return min(service.limits.max_body_bytes for service in self.services)

    # -- their end -------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Admit nobody, and wait until all requests have ended; those that run after `seconds` are cancelled."""
        await asyncio.gather(*(service.admission.drain(seconds) for service in self.services))
        for service in self.services:
            service.templates.close()

    def cancel_all(self) -> None:
        for service in self.services:
            service.admission.cancel_all()

    def close(self) -> None:
        """End all engines, and with them all requests."""
        for service in self.services:
            service.close()


def _these(names: Sequence[str] | Mapping[str, Any]) -> str:
    return f"{', '.join(map(repr, names))} {'are' if len(names) > 1 else 'is'}"
