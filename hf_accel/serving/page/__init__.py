"""The pages: / chats with the model, and shows the plan and the Engine's counters; /docs shows the routes.

They are static files alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from ...undo.state import state_of
from ..models import Models
from ..service import ModelService

FOLDER = Path(__file__).parent
FILES = {  # by path
    "/": "index.html", "/docs": "docs.html",
    **{f"/page/{name}": name for name in ("page.css", "page.js", "docs.js")},
}  # fmt: skip
# A page asks this server alone, and nobody else may show it in a frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(models: Models) -> list[Route]:
    """The pages' files, which need no key, and /plan and /stats, which need the key if there is one.

    /plan: what patch() chose, and whether the model has a chat template. /stats: the Engine's counters. Both are about
    the model that ?model= names, or the first one.
    """

    def service(request: Request) -> ModelService:
        name = request.query_params.get("model")
        return models.services[0] if name is None else models.require_named(name)

    async def file(request: Request) -> Response:
        return FileResponse(FOLDER / FILES[request.url.path], headers=HEADERS)

    async def plan(request: Request) -> Response:
        names = [each.name for each in models.services]
        return JSONResponse({**description(service(request)), "models": names})

    async def stats(request: Request) -> Response:
        return JSONResponse(service(request).engine.stats)

    return [*(Route(path, file) for path in FILES), Route("/plan", plan), Route("/stats", stats)]


def description(service: ModelService) -> dict[str, Any]:
    """Describe the served model: its name, its kind, whether it chats, and the choices of the plan."""
    done = state_of(service.engine.model).description
    has_chat = service.tokenizer.chat_template is not None
    return {"model": service.name, "description": done["model"], "chat": has_chat, "choices": done["choices"]}
