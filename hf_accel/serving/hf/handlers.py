"""The common part of our handlers of chats, completions and responses: a request's way to the Service."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, ClassVar

from starlette.responses import Response, StreamingResponse
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import BaseHandler, Modality
from transformers.utils import logging

from ..api_errors import ApiError
from ..bodies import ChatBody, Common, ResponseBody, read_body
from ..service import Service
from .templates import CAN_RENDER

logger = logging.get_logger(__name__)
# What a client may not give to the chat template: these change apply_chat_template, not what a template says.
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


class OfEngine(BaseHandler):
    """Comes before a handler of transformers: checks the whole body, and asks our Engine instead of generate().

    service: the model and its Engine. The other arguments are those of transformers' handler.
    """

    body_type: ClassVar[type[Common]]

    def __init__(self, service: Service, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.service = service

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request with a Response. Raises ApiError for what is not served."""
        asked = read_body(self.body_type, body)
        self.service.check_name(asked.model)
        self.service.require_ready(asked.num_choices)
        prompts = await self._prompts(asked, body)
        return await self._answer(asked, body, prompts, request_id)

    async def _prompts(self, asked: Any, body: dict[str, Any]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        raise NotImplementedError

    async def _answer(self, asked: Any, body: dict[str, Any], prompts: list[list[int]], request_id: str) -> Response:
        raise NotImplementedError

    async def _render(
        self, asked: ChatBody | ResponseBody, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """Return the token ids of a chat. Raises ApiError (400) for messages that the chat template refuses."""
        tokenizer = self.service.tokenizer
        if tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template; use /v1/completions, or start with --chat-template")
        given = asked.chat_template_kwargs or {}
        if RESERVED & given.keys():
            name = min(RESERVED & given.keys())
            raise ApiError(400, f"chat_template_kwargs: {name} is not served", field="chat_template_kwargs")
        try:
            inputs = self.get_processor_inputs_from_messages(messages, Modality.LLM)
            return await self._tokens(inputs, tools, {**self.chat_template_kwargs, **given})
        except ApiError:
            raise
        except Exception as error:  # whatever a template raises is about what the client sent
            reason = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
            raise ApiError(400, f"the chat template refuses the messages: {reason}", field="messages") from error

    async def _tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]
    ) -> list[int]:
        """Apply the tokenizer's chat template, in a process of its own."""
        tokenizer, service = self.service.tokenizer, self.service
        if not CAN_RENDER or type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            encode = partial(tokenizer.apply_chat_template, messages, tools=tools, add_generation_prompt=True, **more)
            return await service.in_thread(lambda: encode(return_dict=True)["input_ids"])
        text = await service.templates.render(
            conversations=[[{name: value for name, value in one.items() if value is not None} for one in messages]],
            tools=tools, chat_template=tokenizer.get_chat_template(None, tools), add_generation_prompt=True,
            **{**tokenizer.special_tokens_map, **more},
        )  # fmt: skip
        return await service.in_thread(lambda: tokenizer(text, add_special_tokens=False)["input_ids"])

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        """Convert messages as transformers does; other fields of a message, such as a name, go to the template too."""
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        inputs: list[dict[str, Any]] = BaseHandler.get_processor_inputs_from_messages(given, modality)
        return [{**message, **converted} for message, converted in zip(given, inputs, strict=True)]


def event_stream(
    events: AsyncIterator[dict[str, Any]],
    *,
    failed: Callable[[ApiError], list[dict[str, Any]]] = lambda error: [error.body()],
    last: str = "data: [DONE]\n\n",
) -> StreamingResponse:
    """Send dicts as server-sent events, then `last`. failed: the events of an error; the status has been sent."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield f"data: {json.dumps(event)}\n\n"
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a stream ended with an error")
                error = ApiError(500, f"the server failed: {type(error).__name__}")
            for event in failed(error):
                yield f"data: {json.dumps(event)}\n\n"
        yield last

    return StreamingResponse(lines(), media_type="text/event-stream")
