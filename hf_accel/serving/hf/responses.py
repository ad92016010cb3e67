"""/v1/responses, by transformers' own events. Its handler calls every answer completed; ours marks those cut off."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response
from transformers.cli.serving.response import ResponseHandler, _ResponseStreamBuilder, compute_usage

from ..api_errors import ApiError
from ..bodies import ResponseBody, check_messages
from ..service import Job, Prompt
from .completions import MessageParser, deltas_of, parser_for
from .handlers import OfEngine, event_stream


class Responses(OfEngine, ResponseHandler):
    """transformers' handler of responses over our Engine. As in OpenAI's API, an answer is streamed only if asked."""

    body_type = ResponseBody

    async def _prompts(self, asked: ResponseBody, body: dict[str, Any]) -> list[Prompt]:
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
        self, asked: ResponseBody, body: dict[str, Any], prompts: list[Prompt], request_id: str
    ) -> Response:
        tools = self._tools(asked, body)
        parser = parser_for(self.service, asked, prompts[0].ids, tools, request_id=request_id)
        job = self.service.submit(asked, prompts)
        head = {
            "id": f"resp_{request_id}", "created_at": time.time(), "object": "response",
            "model": asked.model or self.service.name,
            "tools": [], "tool_choice": "auto", "parallel_tool_calls": body.get("parallel_tool_calls", False),
        }  # fmt: skip
        answer: Any = Answer(request_id=request_id, response_defaults=head)
        events = events_of(job, parser, answer)
        if asked.stream:
            return event_stream(events, failed=lambda error: answer.error(error.message), last="")
        return JSONResponse([event async for event in events][-1]["response"])


class Answer(_ResponseStreamBuilder):
    """Makes transformers' events of one answer, as dicts. is_cut_off: it has as many tokens as it may have."""

    is_cut_off = False

    def _emit(self, event: Any) -> Any:
        self.seq += 1
        found: dict[str, Any] = event.model_dump(mode="json", exclude_none=True)
        if self.is_cut_off and found["type"] == "response.completed":
            return {**found, "type": "response.incomplete", "response": incomplete(found["response"])}
        if self.is_cut_off and found["type"] == "response.output_item.done":
            return {**found, "item": _cut_off(found["item"])}
        return found

    def delta(self, delta: dict[str, Any]) -> list[Any]:
        """Return the events of a delta of a message."""
        if "reasoning_content" in delta:
            return [*([] if self.reasoning_open else self.start_reasoning()), *self.reasoning_delta(*delta.values())]
        if "content" in delta:
            begun = [] if self.message_open else self.start_message()
            return [*self._thought(), *begun, *self.text_delta(delta["content"])]
        call, number = delta["tool_calls"][0]["function"], len(self.tool_calls)
        said = self.finish_message() if self.message_open else []
        name = f"{self.resp_id.removeprefix('resp_')}_tool_call_{number}"
        return [*self._thought(), *said, *self.tool_call(name, call["name"], call["arguments"])]

    def end(self, job: Job) -> list[Any]:
        """Return the last events; each answer has a message, if an empty one."""
        begun = [] if self.message_open else self.start_message()
        usage = compute_usage(job.num_prompt_tokens, job.num_new_tokens)
        return [*self._thought(), *begun, *self.finish_message(), *self.completed(usage)]

    def _thought(self) -> list[Any]:
        return self.finish_reasoning() if self.reasoning_open else []


async def events_of(job: Job, parser: MessageParser, answer: Any) -> AsyncIterator[dict[str, Any]]:
    """Make the events of an `Answer`. Raises ApiError (500) for one that ends by itself within a call."""
    for event in answer.start_response():
        yield event
    async for news in job.events(keep_special=parser.keeps_special):
        for delta in deltas_of(parser, news):
            for event in answer.delta(delta):
                yield event
        answer.is_cut_off = news.finish_reason == "length"
    if parser.is_broken and not answer.is_cut_off:
        raise ApiError(500, "the end of the answer was not understood: it ends within a call")
    for event in answer.end(job):
        yield event


def incomplete(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response as OpenAI's API writes one that max_output_tokens, or the context, has ended."""
    return {
        **response,
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [_cut_off(item) for item in response["output"]],
    }


def _cut_off(item: dict[str, Any]) -> dict[str, Any]:
    """Mark the message as cut off. It is the only item that can be: calls come whole or not at all."""
    return {**item, "status": "incomplete"} if item["type"] == "message" else item
