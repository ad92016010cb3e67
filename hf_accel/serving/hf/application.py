"""The ASGI application: transformers' own, with our handlers, our routes and the guard around it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from ..api_errors import ApiError, error_body
from ..bodies import AdapterBody, AdapterName, read_body
from ..guard import Guard, Hosts
from ..page import page_routes
from ..service import Service, known_keywords
from .completions import Chat, Completions
from .responses import Responses

# What is kept of transformers' routes. Those that load and unload models, and those that need other models, go.
KEPT = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
OUR_ROUTES = ("/v1/models", *ADAPTER_ROUTES, "/health", "/ready", "/metrics", "/plan", "/stats", "/")


def make_app(
    service: Service,
    *,
    api_key: str | None = None,
    hosts: Hosts | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> ASGIApp:
    """Build the application of a service. api_key: what clients must send as `Authorization: Bearer KEY`.

    hosts: the names that requests may be sent to if there is no key; None takes all, for an application behind another
    server, which knows its names.
    chat_template_kwargs: what the chat template gets unless a request says otherwise.
    """
    manager, state = OneModel(service), GenerationState()
    shared: dict[str, Any] = {"model_manager": manager, "generation_state": state}
    template = {"chat_template_kwargs": chat_template_kwargs or {}}
    handlers = {
        "chat_handler": Chat(service, **shared, **template),
        "completion_handler": Completions(service, **shared),
        "response_handler": Responses(service, **shared, **template),
        "transcription_handler": None,  # their routes are not kept
        "systemone_handler": None,
    }
    app: FastAPI = build_server(**known_keywords(build_server, {**shared, **handlers}))
    app.user_middleware.clear()  # the guard sets the request's id, and sees when a client goes away
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in KEPT]
    _add_routes(app, service, manager)
    _add_adapters(app, service)
    app.router.routes += page_routes(service)
    _add_errors(app)
    return Guard(app, service, api_key=api_key, hosts=hosts, paths=(*KEPT, *OUR_ROUTES))


def _add_routes(app: FastAPI, service: Service, manager: OneModel) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": manager.get_gen_models()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_name(name)
        return JSONResponse(next(each for each in manager.get_gen_models() if each["id"] == name))

    @app.get("/health")
    async def health() -> Response:
        if not service.engine.is_live:
            return JSONResponse({"status": "unhealthy", "reason": service.unready()}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        reason = service.unready()
        return JSONResponse({"status": "unready", "reason": reason}, 503) if reason else JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        page, kind = service.metrics.page()
        return Response(page, headers={"content-type": kind})


def _add_adapters(app: FastAPI, service: Service) -> None:
    @app.post(ADAPTER_ROUTES[0])
    async def load(body: dict[str, Any]) -> Response:
        asked = read_body(AdapterBody, body)
        await asyncio.to_thread(service.load_asked, asked)
        return JSONResponse({"loaded": asked.lora_name})

    @app.post(ADAPTER_ROUTES[1])
    async def unload(body: dict[str, Any]) -> Response:
        asked = read_body(AdapterName, body)
        service.unload_asked(asked)
        return JSONResponse({"unloaded": asked.lora_name})


def _add_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def known(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path[:200]} is not served; POST {', '.join(KEPT)} are"
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return JSONResponse(error_body(400, "the body is not a JSON object, or is not sent as application/json"), 400)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, f"the server failed: {type(error).__name__}"), 500)


class OneModel(ModelManager):
    """transformers' manager of models, with one model that is never unloaded."""

    def __init__(self, service: Service) -> None:
        super().__init__(model_timeout=-1)
        self._service = service
        self._created = int(time.time())

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._service.engine.model, self._service.tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the served model, and the adapters that are loaded for it, as entries of OpenAI's list of models."""
        context, own = self._service.context, self._service.name
        shared = {"object": "model", "created": self._created, "owned_by": "hf_accel"}
        shared |= {} if context is None else {"max_model_len": context}
        return [{"id": name, **shared, **({} if name == own else {"parent": own})} for name in self._service.names]

    def shutdown(self) -> None:
        """End the Engine; called when the server ends."""
        self._service.close()
