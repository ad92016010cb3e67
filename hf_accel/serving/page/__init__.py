"""The page at /: it chats with the model, and shows the plan and the Engine's counters. Static files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from ...undo.state import state_of
from ..service import Service

FOLDER = Path(__file__).parent
FILES = {"/": "index.html", "/page/page.css": "page.css", "/page/page.js": "page.js"}  # by path
# The page asks this server alone, and nobody else may show it in a frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(service: Service) -> list[Route]:
    """The page's files, which need no key, and /plan and /stats, which need the key if there is one.

    /plan: what patch() chose, and whether the model has a chat template. /stats: the Engine's counters.
    """

    async def file(request: Request) -> Response:
        return FileResponse(FOLDER / FILES[request.url.path], headers=HEADERS)

    async def plan(_: Request) -> Response:
        return JSONResponse(description(service))

    async def stats(_: Request) -> Response:
        return JSONResponse(service.engine.stats)

    return [*(Route(path, file) for path in FILES), Route("/plan", plan), Route("/stats", stats)]


def description(service: Service) -> dict[str, Any]:
    """Describe the served model: its name, its kind, whether it chats, and the choices of the plan."""
    done = state_of(service.engine.model).description
    has_chat = service.tokenizer.chat_template is not None
    return {"model": service.name, "description": done["model"], "chat": has_chat, "choices": done["choices"]}
