"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response

from ..bodies import read_body
from ..formats import AdapterBody, AdapterName
from ..service import Service


class LoadAdapter:
    """Loads an adapter from the folder of adapters."""

    body_type: ClassVar[Any] = AdapterBody

    def __init__(self, service: Service) -> None:
        self.service = service

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        asked = read_body(AdapterBody, body)
        await asyncio.to_thread(self.service.load_asked, asked)
        return JSONResponse({"loaded": asked.lora_name})


class UnloadAdapter:
    """Unloads an adapter. Requests that run with it end with it."""

    body_type: ClassVar[Any] = AdapterName

    def __init__(self, service: Service) -> None:
        self.service = service

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        asked = read_body(AdapterName, body)
        self.service.unload_asked(asked)
        return JSONResponse({"unloaded": asked.lora_name})
