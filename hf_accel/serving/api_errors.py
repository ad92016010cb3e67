"""Errors that a client gets, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# OpenAI's names for kinds of errors; clients choose the class of their exception by the status.
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that ends with an HTTP status other than 200.

    message: one sentence for the client. field: the field of the request's body that is wrong, if it is one.
    headers: are added to the answer.
    """

    def __init__(
        self, status: int, message: str, *, field: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return what is sent as JSON."""
        return error_body(self.status, self.message, self.field)


def error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error in OpenAI's form."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def unavailable(message: str, seconds: int) -> ApiError:
    """Make the error 503: the server cannot take requests now. seconds: when the client may try again."""
    return ApiError(503, message, headers={"Retry-After": str(seconds)})
