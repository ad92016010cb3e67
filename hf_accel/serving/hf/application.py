"""The ASGI application: our handlers over transformers' own, our routes, and the guard around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

from ..api_errors import ApiError, error_body
from ..guard import Guard, Hosts
from ..models import Models
from ..openapi import document
from ..page import FILES, page_routes
from ..rows import Embeddings, Rerank, RowHandler, RowService, Score
from ..service import ModelService, Service
from .adapter_routes import LoadAdapter, UnloadAdapter
from .completions import Chat, Completions
from .handlers import OfEngine
from .responses import Responses
from .tokens import Detokenize, Tokenize
from .transcriptions import FORM, Transcriber, Transcriptions, form_body

Handler = OfEngine | RowHandler | Transcriptions
OUR_ROUTES = ("/v1/models", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/plan", "/stats")


def make_app(
    models: Models,
    *,
    api_key: str | None = None,
    hosts: Hosts | None = None,
    origins: Collection[str] = (),
    chat_template_kwargs: dict[str, Any] | None = None,
) -> ASGIApp:
    """Build the application of some models. api_key: what clients must send as `Authorization: Bearer KEY`.

    hosts: the names that requests may be sent to if there is no key; None takes all, for an application behind another
    server, which knows its names. origins: of other sites whose pages may ask, or "*".
    chat_template_kwargs: what the chat template gets unless a request says otherwise.
    """
    answering: dict[str, dict[str, Handler]] = {}  # by path, and by the model's name
    for service in models.services:
        for path, handler in handlers_of(service, chat_template_kwargs or {}).items():
            answering.setdefault(path, {})[service.name] = handler
    posts: dict[str, Post] = {path: OfModels(models, handlers) for path, handlers in answering.items()}
    if models.writing:
        posts |= {"/v1/load_lora_adapter": LoadAdapter(models), "/v1/unload_lora_adapter": UnloadAdapter(models)}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        models.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # its own pages load programs of another site
    for path, post in posts.items():
        _add_post(app, path, post)
    _add_routes(app, models)
    page = page_routes(models)
    app.router.routes += page
    described = document(posts, (route for route in app.routes if route not in page))
    app.get("/openapi.json")(lambda: JSONResponse(described))
    _add_errors(app, posts)
    paths = dict.fromkeys((*posts, *OUR_ROUTES, *FILES), models.least_body_bytes)
    for path, handlers in answering.items():
        paths[path] = max(handler.service.limits.max_body_bytes for handler in handlers.values())
    return Guard(app, models, api_key=api_key, hosts=hosts, origins=origins, paths=paths)


class OfModels:
    """Answers the POST requests of one path, by the handler of the model that each names."""

    def __init__(self, models: Models, handlers: Mapping[str, Handler]) -> None:
        self._models, self._handlers = models, handlers
        self.body_type: Any = next(iter(handlers.values())).body_type

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        answer: Response = await self._models.chosen(self._handlers, body.get("model")).handle_request(
            body, request_id
        )
        return answer


Post = OfModels | LoadAdapter | UnloadAdapter


def handlers_of(service: ModelService, chat_template_kwargs: dict[str, Any]) -> dict[str, Handler]:
    """Return what answers the POST requests of each path for a model."""
    shared: dict[str, Any] = {"model_manager": OneModel(service), "generation_state": GenerationState()}
    template = {**shared, "chat_template_kwargs": chat_template_kwargs}
    tokens: dict[str, Handler] = {
        "/tokenize": Tokenize(service, **template),
        "/detokenize": Detokenize(service, **shared),
    }
    if isinstance(service, RowService) and isinstance(service.encoder, Transcriber):
        return {"/v1/audio/transcriptions": Transcriptions(service), **tokens}
    if isinstance(service, RowService):
        rerank, score = Rerank(service), Score(service)
        pairs: dict[str, Handler] = {"/v1/rerank": rerank, "/v1/score": score}
        pairs |= {"/rerank": rerank, "/v2/rerank": rerank, "/score": score}  # where vLLM's clients ask too
        vectors: dict[str, Handler] = {} if service.encoder.scores else {"/v1/embeddings": Embeddings(service)}
        return {**vectors, **pairs, **tokens}
    assert isinstance(service, Service)
    return {
        "/v1/chat/completions": Chat(service, **template),
        "/v1/completions": Completions(service, **shared),
        "/v1/responses": Responses(service, **template),
        **tokens,
    }


def _add_post(app: FastAPI, path: str, post: Post) -> None:
    if post.body_type.media_type == FORM:

        @app.post(path)
        async def form(request: Request) -> Response:
            return await post.handle_request(await form_body(request), request.state.request_id)

        return

    @app.post(path)
    async def body(request: Request, body: dict[str, Any]) -> Response:
        return await post.handle_request(body, request.state.request_id)


def _add_routes(app: FastAPI, models: Models) -> None:
    created = int(time.time())

    @app.get("/version")
    async def version_of_ours() -> Response:
        return JSONResponse({"version": version("hf_accel")})

    @app.get("/v1/models")
    async def listed() -> Response:
        return JSONResponse({"object": "list", "data": [*entries(models.services, created)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service = models.require_named(name)
        return JSONResponse(next(each for each in entries([service], created) if each["id"] == name))

    @app.get("/health")
    async def health() -> Response:
        dead = [service.name for service in models.services if not service.engine.is_live]
        if not dead:
            return JSONResponse({"status": "ok"})
        reasons = {name: reason for name, reason in models.unready().items() if name in dead}
        if models.is_live:
            return JSONResponse({"status": "degraded", "reasons": reasons})
        return JSONResponse({"status": "unhealthy", "reasons": reasons}, 503)

    @app.get("/ready")
    async def ready() -> Response:
        reasons = models.unready()
        if len(reasons) == len(models.services):
            return JSONResponse({"status": "unready", "reasons": reasons}, 503)
        return JSONResponse({"status": "degraded", "reasons": reasons} if reasons else {"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        page, kind = models.metrics.page()
        return Response(page, headers={"content-type": kind})


def entries(services: Iterable[ModelService], created: int) -> Iterator[dict[str, Any]]:
    """Iterate over models, and the adapters that are loaded for each, as entries of OpenAI's list of models."""
    for service in services:
        shared = {"object": "model", "created": created, "owned_by": "hf_accel"}
        shared |= {} if service.context is None else {"max_model_len": service.context}
        for name in service.names:
            yield {"id": name, **shared, **({} if name == service.name else {"parent": service.name})}


def _add_errors(app: FastAPI, posts: Iterable[str]) -> None:
    """Answer every error in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def known(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path[:200]} is not served; POST {', '.join(posts)} are"
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return JSONResponse(error_body(400, "the body is not a JSON object, or is not sent as application/json"), 400)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, f"the server failed: {type(error).__name__}"), 500)


class OneModel(ModelManager):
    """transformers' manager of models, with one model that is never unloaded."""

    def __init__(self, service: ModelService) -> None:
        super().__init__(model_timeout=-1)
        self._service = service

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._service.engine.model, self._service.tokenizer
