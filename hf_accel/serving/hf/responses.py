"""/v1/responses, by transformers' own events."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from transformers.cli.serving.response import ResponseHandler

from ..api_errors import ApiError
from ..bodies import ResponseBody, check_messages
from ..service import known_keywords
from .handlers import OfEngine


class Responses(OfEngine, ResponseHandler):
    """transformers' handler of responses over our Engine. As in OpenAI's API, an answer is streamed only if asked."""

    body_type = ResponseBody

    def _prompts(self, asked: ResponseBody, body: dict[str, Any]) -> list[list[int]]:
        return [self._render(asked, self._messages(body), self._tools(asked, body))]

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
        answer: Any = self._streaming if asked.stream else self._non_streaming
        more = known_keywords(answer, {"tools": self._tools(asked, body)})
        found: Any = answer(
            request_id,
            self.service.engine.model,
            self.service.tokenizer,
            self.service.name,
            body,
            {"input_ids": prompts[0]},
            asked,
            gen_manager=self.generation_state.get_manager(self.service.name),
            **more,
        )
        response: Response = found if asked.stream else await found
        return response
