"""/v1/responses, by transformers' own events. Its handler calls every answer completed; we say which are cut off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from transformers.cli.serving.response import ResponseHandler

from ..api_errors import ApiError
from ..bodies import ResponseBody, check_messages
from ..service import known_keywords
from .engine_manager import EngineManager
from .handlers import OfEngine


class Responses(OfEngine, ResponseHandler):
    """transformers' handler of responses over our Engine. As in OpenAI's API, an answer is streamed only if asked."""

    body_type = ResponseBody

    async def _prompts(self, asked: ResponseBody, body: dict[str, Any]) -> list[list[int]]:
        return [await self._render(asked, self._messages(body), self._tools(asked, body))]

    def _messages(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the input as the messages of a chat. Raises ApiError (400) for items of another form."""
        try:
            messages: list[dict[str, Any]] = self._normalize_input(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise ApiError(400, f"input has an item that is not understood: {error!r}", field="input") from error
        check_messages(messages, field="input")
        return messages

    def _tools(self, asked: ResponseBody, body: dict[str, Any]) -> list[dict[str, Any]] | None:
        tools: list[dict[str, Any]] | None = self._normalize_tools(body.get("tools"))
        return None if asked.tool_choice == "none" else tools or None

    async def _answer(
        self, asked: ResponseBody, body: dict[str, Any], prompts: list[list[int]], request_id: str
    ) -> Response:
        streaming: Any = self._streaming
        more = known_keywords(streaming, {"tools": self._tools(asked, body)})
        manager = EngineManager(self.service)
        stream: Any = streaming(
            request_id,
            self.service.engine.model,
            self.service.tokenizer,
            self.service.name,
            body,
            {"input_ids": prompts[0]},
            asked,
            gen_manager=manager,
            **more,
        )
        parts = _with_end(stream.body_iterator, manager)
        if asked.stream:
            return StreamingResponse(parts, media_type=stream.media_type)
        # Transformers' own whole answers fail where the text ends within a call.
        last = [part async for part in parts][-1]
        if manager.failure is not None:
            raise manager.failure
        return JSONResponse(_events(last)[-1]["response"])


async def _with_end(parts: AsyncIterator[str], manager: EngineManager) -> AsyncIterator[str]:
    """Hand on transformers' server-sent events; the last ones say so if the answer was cut off.

    The last two parts are the end of the message, by itself, and the end of the response.
    """
    async for part in parts:
        if not manager.is_cut_off:
            yield part
            continue
        events = _events(part)
        last = events[-1]
        if last["type"] == "response.completed":
            last |= {"type": "response.incomplete", "response": incomplete(last["response"])}
        elif last["type"] == "response.output_item.done":
            last["item"] = _cut_off(last["item"])
        yield "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def _events(part: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in part.split("\n\n") if line]


def incomplete(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response as OpenAI's API writes one that max_output_tokens, or the context, has ended."""
    return {
        **response,
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [_cut_off(item) for item in response["output"]],
    }


def _cut_off(item: dict[str, Any]) -> dict[str, Any]:
    """The message is what is cut off: it is written to the end, and calls come whole or not at all."""
    return {**item, "status": "incomplete"} if item["type"] == "message" else item
