"""/openapi.json: the routes of this server, with the fields that their bodies are checked by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Protocol

from pydantic.json_schema import models_json_schema

from .bodies import Common
from .formats import Closed

ABOUT = {  # path -> one sentence
    "/v1/chat/completions": "Writes the next message of a chat.",
    "/v1/completions": "Writes on from a text.",
    "/v1/responses": "Writes the next message of a chat, in the form of OpenAI's Responses API. Nothing is stored.",
    "/v1/load_lora_adapter": "Loads an adapter of a model, if the server lets clients do so.",
    "/v1/unload_lora_adapter": "Unloads an adapter of a model, if the server lets clients do so.",
    "/tokenize": "Returns the tokens of a text or of a chat.",
    "/detokenize": "Returns the text of tokens.",
    "/v1/embeddings": "Returns a vector for each text.",
    "/v1/rerank": "Sorts documents by how well they answer a query.",
    "/v1/score": "Returns a score for each two texts.",
    "/rerank": "The same as /v1/rerank.",
    "/v2/rerank": "The same as /v1/rerank.",
    "/score": "The same as /v1/score.",
    "/v1/audio/transcriptions": "Returns what was said in a sound.",
    "/v1/models": "Lists the models that are served, and their adapters.",
    "/v1/models/{name}": "Describes a model that is served.",
    "/health": "Says whether the engines of the models live.",
    "/ready": "Says whether requests are taken.",
    "/metrics": "Returns counters and times for Prometheus.",
    "/version": "Returns the version of hf_accel.",
}
SCHEMAS = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
REFUSED: dict[str, Any] = {
    "description": "The request was refused, or failed, and this says why.",
    "content": {"application/json": {"schema": {"$ref": SCHEMAS.format(model="Error")}}},
}


class Handler(Protocol):
    """It answers the POST requests of a path. body_type: of their bodies."""

    @property
    def body_type(self) -> Any: ...


def document(posts: Mapping[str, Handler], routes: Iterable[Any]) -> dict[str, Any]:
    """Return the description of a server, in the form of OpenAPI. routes: all that are described, with their methods.

    The schema of a body is that by which it is checked. A server may allow less: of a number, by its limits, and of a
    chat, by what the model takes.
    """
    kinds: list[type[Closed]] = sorted({one.body_type for one in posts.values()}, key=lambda kind: kind.__name__)
    _, found = models_json_schema([(kind, "validation") for kind in kinds], ref_template=SCHEMAS)
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in route.methods - {"HEAD"}:
            kind = posts[path].body_type if method == "POST" else None
            paths.setdefault(path, {})[method.lower()] = _operation(ABOUT[path], kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "hf_accel", "version": version("hf_accel")},
        "paths": paths,
        "components": {
            "schemas": {**found["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(about: str, kind: type[Closed] | None) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {}}
    if kind is not None and issubclass(kind, Common):
        answer["text/event-stream"] = {}  # where stream is true
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {"200": {"description": "The answer.", "content": answer}, "default": REFUSED},
    }
    if kind is not None:
        schema = {"$ref": SCHEMAS.format(model=kind.__name__)}
        operation["requestBody"] = {"required": True, "content": {kind.media_type: {"schema": schema}}}
    return operation
