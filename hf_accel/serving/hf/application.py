"""The ASGI application: our handlers over transformers' own, our routes, and the guard around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection, Mapping
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
from ..openapi import document
from ..page import FILES, page_routes
from ..rows import Embeddings, Rerank, RowHandler, RowService, Score
from ..service import ModelService, Service
from .adapter_routes import LoadAdapter, UnloadAdapter
from .completions import Chat, Completions
from .handlers import OfEngine
from .responses import Responses
from .tokens import Detokenize, Tokenize
from .transcriptions import Transcriber, Transcriptions

Handler = OfEngine | RowHandler | Transcriptions | LoadAdapter | UnloadAdapter
OUR_ROUTES = ("/v1/models", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/plan", "/stats")


def make_app(
    service: ModelService,
    *,
    api_key: str | None = None,
    hosts: Hosts | None = None,
    origins: Collection[str] = (),
    chat_template_kwargs: dict[str, Any] | None = None,
) -> ASGIApp:
    """Build the application of a service. api_key: what clients must send as `Authorization: Bearer KEY`.

    hosts: the names that requests may be sent to if there is no key; None takes all, for an application behind another
    server, which knows its names. origins: of other sites whose pages may ask, or "*".
    chat_template_kwargs: what the chat template gets unless a request says otherwise.
    """
    manager = OneModel(service)
    posts = handlers_of(service, manager, chat_template_kwargs or {})

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        manager.shutdown()

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # its own pages load programs of another site
    for path, handler in posts.items():
        _add_post(app, path, handler)
    _add_routes(app, service, manager)
    page = page_routes(service)
    app.router.routes += page
    described = document(posts, (route for route in app.routes if route not in page))
    app.get("/openapi.json")(lambda: JSONResponse(described))
    _add_errors(app, posts)
    paths = (*posts, *OUR_ROUTES, *FILES)
    return Guard(app, service, api_key=api_key, hosts=hosts, origins=origins, paths=paths)


def handlers_of(service: ModelService, manager: OneModel, chat_template_kwargs: dict[str, Any]) -> dict[str, Handler]:
    """Return what answers the POST requests of each path."""
    shared: dict[str, Any] = {"model_manager": manager, "generation_state": GenerationState()}
    template = {**shared, "chat_template_kwargs": chat_template_kwargs}
    tokens: dict[str, Handler] = {
        "/tokenize": Tokenize(service, **template),
        "/detokenize": Detokenize(service, **shared),
    }
    if isinstance(service, RowService) and isinstance(service.encoder, Transcriber):
        return {"/v1/audio/transcriptions": Transcriptions(service), **tokens}
    if isinstance(service, RowService):
        pairs: dict[str, Handler] = {"/v1/rerank": Rerank(service), "/v1/score": Score(service)}
        vectors: dict[str, Handler] = {} if service.encoder.scores else {"/v1/embeddings": Embeddings(service)}
        return {**vectors, **pairs, **tokens}
    assert isinstance(service, Service)
    return {
        "/v1/chat/completions": Chat(service, **template),
        "/v1/completions": Completions(service, **shared),
        "/v1/responses": Responses(service, **template),
        "/v1/load_lora_adapter": LoadAdapter(service),
        "/v1/unload_lora_adapter": UnloadAdapter(service),
        **tokens,
    }


def _add_post(app: FastAPI, path: str, handler: Handler) -> None:
    if isinstance(handler, Transcriptions):
        app.post(path)(handler.handle_form)
        return

    @app.post(path)
    async def post(request: Request, body: dict[str, Any]) -> Response:
        answer: Response = await handler.handle_request(body, request.state.request_id)
        return answer


def _add_routes(app: FastAPI, service: ModelService, manager: OneModel) -> None:
    @app.get("/version")
    async def version_of_ours() -> Response:
        return JSONResponse({"version": version("hf_accel")})

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


def _add_errors(app: FastAPI, posts: Mapping[str, Handler]) -> None:
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
