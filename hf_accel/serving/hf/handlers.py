"""The common part of our handlers of chats, completions and responses: a request's way to the Service."""

from __future__ import annotations

import asyncio
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
from ..bodies import ChatBody, ResponseBody, read_body
from ..formats import Named
from ..images import read_images
from ..service import Prompt, Service
from ..text_bodies import TokenizeBody
from .templates import CAN_RENDER

logger = logging.get_logger(__name__)
Messages = list[dict[str, Any]]
OfChat = ChatBody | ResponseBody | TokenizeBody
EFFORT = "reasoning_effort"
# What a client may not give to the chat template: these change apply_chat_template, not what a template says.
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


class OfEngine(BaseHandler):
    """Comes before a handler of transformers: checks the whole body, and asks our Engine instead of generate().

    service: the model and its Engine. The other arguments are those of transformers' handler.
    """

    body_type: ClassVar[type[Named]]

    def __init__(self, service: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.service: Service = service  # of an encoder, for the two handlers of tokens

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request with a Response. Raises ApiError for what is not served."""
        asked = self._checked(body)
        self.service.require_ready(asked.num_choices)
        await self.service.compiling.compile(self.service.engine, asked)
        prompts = await self._prompts(asked, body)
        return await self._answer(asked, body, prompts, request_id)

    def _checked(self, body: dict[str, Any]) -> Any:
        """Return the body as its `body_type`. Raises ApiError: 400 for what is not served, 404 for another model."""
        asked = read_body(self.body_type, body, ignore_unknown=self.service.limits.ignore_unknown_fields)
        return asked

    async def _prompts(self, asked: Any, body: dict[str, Any]) -> list[Prompt]:
        """Return the prompts that the body holds."""
        raise NotImplementedError

    async def _answer(self, asked: Any, body: dict[str, Any], prompts: list[Prompt], request_id: str) -> Response:
        raise NotImplementedError

    async def _render(
        self,
        asked: ChatBody | ResponseBody | TokenizeBody,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> Prompt:
        """Return the prompt of a chat. Raises ApiError (400) for messages that the chat template refuses."""
        tokenizer = self.service.tokenizer
        if tokenizer.chat_template is None:
            reads = ", and reads its prompts with an encoder" if self.service.has_encoder else ""
            way_out = "use /v1/completions, or start with --chat-template"
            raise ApiError(400, f"the model has no chat template{reads}; {way_out}")
        given = {**self._effort(asked, tools), **(asked.chat_template_kwargs or {})}
        if RESERVED & given.keys():
            name = min(RESERVED & given.keys())
            raise ApiError(400, f"chat_template_kwargs: {name} is not served", field="chat_template_kwargs")
        processor, urls = self.service.processor, image_urls(messages)
        if urls and processor is None:
            raise ApiError(400, "the model, or its checkpoint, takes no images", field="messages")
        images = await asyncio.to_thread(read_images, urls, self.service.limits) if urls else []
        try:
            inputs = self.get_processor_inputs_from_messages(messages, Modality.VLM if processor else Modality.LLM)
            more = {**self.chat_template_kwargs, **given}
            if images:
                return await self._with_images(inputs, tools, more, images)
            return Prompt(await self._tokens(inputs, tools, more))
        except ApiError:
            raise
        except Exception as error:  # whatever a template raises is about what the client sent
            reason = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
            raise ApiError(400, f"the chat template refuses the messages: {reason}", field="messages") from error

    def _effort(
        self, asked: ChatBody | ResponseBody | TokenizeBody, tools: list[dict[str, Any]] | None
    ) -> dict[str, str]:
        """Return the effort that a request asks for, for the chat template. Raises ApiError (400) if it reads none."""
        effort = asked.reasoning_effort
        if effort is None:
            return {}
        if EFFORT in self.service.tokenizer.get_chat_template(None, tools):
            return {EFFORT: effort}
        if self.service.limits.ignore_unknown_fields:
            return {}
        message = f"the model's chat template reads no {EFFORT}; leave it out, or start with --ignore-unknown-fields"
        raise ApiError(400, message, field=EFFORT)

    async def _tokens(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]
    ) -> list[int]:
        """Apply the tokenizer's chat template, in a process of its own."""
        tokenizer, service = self.service.tokenizer, self.service
        if not CAN_RENDER or type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            encode = partial(tokenizer.apply_chat_template, messages, tools=tools, add_generation_prompt=True, **more)
            return await service.in_thread(lambda: encode(return_dict=True)["input_ids"])
        text = await self._text(messages, tools, more)
        return await service.in_thread(lambda: tokenizer(text, add_special_tokens=False)["input_ids"])

    async def _text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]
    ) -> str:
        """Return the text of a chat, by the template in a process of its own where there can be one."""
        tokenizer, service = self.service.tokenizer, self.service
        if not CAN_RENDER:
            render = partial(tokenizer.apply_chat_template, messages, tools=tools, add_generation_prompt=True, **more)
            return await service.in_thread(lambda: render(tokenize=False))
        return await service.templates.render(
            conversations=[[{name: value for name, value in one.items() if value is not None} for one in messages]],
            tools=tools, chat_template=tokenizer.get_chat_template(None, tools), add_generation_prompt=True,
            **{**tokenizer.special_tokens_map, **more},
        )  # fmt: skip

    async def _with_images(
        self, messages: Messages, tools: Messages | None, more: dict[str, Any], images: list[Any]
    ) -> Prompt:
        """Return the prompt that the model's processor makes of a chat with images.

        As in transformers' apply_chat_template, the processor adds special tokens unless the text begins with one.
        """
        text = await self._text(without_urls(messages), tools, more)
        begin = self.service.tokenizer.bos_token
        special = {"add_special_tokens": False} if begin is not None and text.startswith(begin) else {}
        process = partial(self.service.processor, text=[text], images=[images], return_tensors="pt", **special)
        made = dict(await self.service.in_thread(process))
        return Prompt(made.pop("input_ids")[0].tolist(), made)

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Modality) -> list[dict[str, Any]]:
        """Convert messages as transformers does; other fields of a message, such as a name, go to the template too."""
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        inputs: list[dict[str, Any]] = BaseHandler.get_processor_inputs_from_messages(given, modality)
        return [{**message, **converted} for message, converted in zip(given, inputs, strict=True)]


def image_urls(messages: list[dict[str, Any]]) -> list[str]:
    """Return the URLs of the images in messages that were checked, in their order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    found = [part["image_url"] for part in parts if part.get("type") in ("image_url", "input_image")]
    return [one["url"] if isinstance(one, dict) else one for one in found]


def without_urls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose images are places in them alone, which is all that a template writes."""
    return [
        {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


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
