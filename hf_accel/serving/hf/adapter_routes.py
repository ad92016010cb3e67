"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response

from ...errors import UnsupportedError
from ..api_errors import ApiError
from ..bodies import read_body
from ..formats import AdapterBody, AdapterName
from ..models import Models
from ..service import Service


class LoadAdapter:
    """Loads an adapter from the folder of adapters."""

    body_type: ClassVar[Any] = AdapterBody

    def __init__(self, models: Models) -> None:
        self.models = models

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """Answer a request. Raises ApiError: 400 for what cannot be loaded, 403 where no client may."""
        asked = read_body(AdapterBody, body)
        service = self.models.chosen(self.models.writing, asked.model)
        folder = adapter_folder(service)
        path = (folder / asked.lora_path).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ApiError(403, f"{asked.lora_path[:200]!r} is not in the folder of adapters", field="lora_path")
        try:
            await asyncio.to_thread(self.models.load_adapter, asked.lora_name, path, model=service.name)
        except UnsupportedError as error:
            # Where the server keeps its adapters is not for clients.
            raise ApiError(400, str(error).replace(str(path), asked.lora_path)) from error
        return JSONResponse({"loaded": asked.lora_name})


class UnloadAdapter:
    """Unloads an adapter. Requests that run with it end with it."""

    body_type: ClassVar[Any] = AdapterName

    def __init__(self, models: Models) -> None:
        self.models = models

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """Answer a request. Raises ApiError: 404 if there is none, 403 where no client may."""
        asked = read_body(AdapterName, body)
        writing = self.models.writing.values()
        found = [one for one in writing if asked.lora_name in one.names and asked.lora_name != one.name]
        for service in found or writing:
            adapter_folder(service)
        try:
            for service in found:
                service.engine.unload_adapter(asked.lora_name)
        except UnsupportedError:  # another client was faster
            found = []
        if not found:
            raise ApiError(404, f"no adapter {asked.lora_name[:200]!r} is loaded", field="lora_name")
        return JSONResponse({"unloaded": asked.lora_name})


def adapter_folder(service: Service) -> Path:
    """Return the folder of adapters that clients may load. Raises ApiError (403) if they may load none."""
    folder = service.limits.adapter_folder
    if folder is None:
        raise ApiError(403, "this server lets no client load adapters; start it with --adapter-folder")
    return folder
