"""/v1/completions and /v1/chat/completions: continuations of texts, and the next message of a chat.

A message has thoughts and calls of tools as well as text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import ReasoningText, ToolCall, build_response_parser, response_events_to_chunks
from transformers.utils import logging

from ...keywords import known_keywords
from ..api_errors import ApiError
from ..bodies import ChatBody, Choices, CompletionBody, ResponseBody
from ..called_tools import read_calls
from ..service import Event, Job, Prompt, Service
from ..token_text import ScoredToken
from .handlers import OfEngine, event_stream

logger = logging.get_logger(__name__)
REPLACEMENT = "\ufffd"


# -- texts --------------------------------------------------------------------------------------------


class Completions(OfEngine, CompletionHandler):
    """transformers' handler of completions, with several prompts, n, log-probabilities and checked fields."""

    body_type = CompletionBody

    async def _prompts(self, asked: CompletionBody, body: dict[str, Any]) -> list[Prompt]:
        if len(asked.prompts) > self.service.limits.most_choices or not asked.prompts:
            message = f"prompt holds {len(asked.prompts)} prompts; send 1 to {self.service.limits.most_choices}"
            raise ApiError(400, message, field="prompt")
        return await self.service.in_thread(
            lambda: [
                Prompt(self.service.ids(prompt) if isinstance(prompt, str) else prompt) for prompt in asked.prompts
            ]
        )

    async def _answer(
        self, asked: CompletionBody, body: dict[str, Any], prompts: list[Prompt], request_id: str
    ) -> Response:
        job = self.service.submit(asked, prompts)
        head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model or self.service.name,
        }
        if asked.stream:
            return event_stream(with_usage(self._events(job, asked, head), job, asked, head))
        found = await collected(job, lambda event: [{"text": event.text}])
        choices = [
            _text_choice(index, choice["text"], _text_logprobs(asked, entries), reason)
            for index, (choice, entries, reason) in enumerate(found)
        ]
        return JSONResponse({**head, "choices": choices, "usage": usage(job)})

    async def _events(self, job: Job, asked: CompletionBody, head: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for event in job.events():
            found = _text_logprobs(asked, event.entries) if event.entries else None
            yield {**head, "choices": [_text_choice(event.index, event.text, found, event.finish_reason)]}


def _text_choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _text_logprobs(asked: CompletionBody, entries: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """Return log-probabilities in the form of the completions API: a list for each kind of fact."""
    if asked.num_logprobs is None:
        return None
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [dict(entry.top) for entry in entries],
        "text_offset": [entry.start for entry in entries],
    }


# -- chats --------------------------------------------------------------------------------------------


class Chat(OfEngine, ChatCompletionHandler):
    """transformers' handler of chats, with n, log-probabilities, tool_choice="none" and checked fields."""

    body_type = ChatBody

    async def _prompts(self, asked: ChatBody, body: dict[str, Any]) -> list[Prompt]:
        return [await self._render(asked, body["messages"], _tools(asked, body))]

    async def _answer(self, asked: ChatBody, body: dict[str, Any], prompts: list[Prompt], request_id: str) -> Response:
        parsers = [
            parser_for(self.service, asked, prompts[0].ids, _tools(asked, body), request_id=request_id, index=index)
            for index in range(asked.num_choices)
        ]
        job = self.service.submit(asked, prompts)
        head = {"id": f"chatcmpl-{request_id}", "created": int(time.time())}
        head["model"] = asked.model or self.service.name
        if asked.stream:
            head["object"] = "chat.completion.chunk"
            return event_stream(with_usage(self._chunks(job, asked, parsers, head), job, asked, head))
        return JSONResponse(await self._whole(job, asked, parsers, {**head, "object": "chat.completion"}))

    async def _chunks(
        self, job: Job, asked: ChatBody, parsers: list[MessageParser], head: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        for index in range(job.num_choices):
            yield {**head, "choices": [_chunk(index, {"role": "assistant", "content": ""})]}
        async for event in job.events(keep_special=parsers[0].keeps_special):
            deltas = deltas_of(parsers[event.index], event)
            if event.entries and not deltas:
                deltas = [{}]
            for number, delta in enumerate(deltas):
                found = _logprobs(asked, event.entries) if number == 0 and event.entries else None
                yield {**head, "choices": [_chunk(event.index, delta, found)]}
            if event.finish_reason is not None:
                reason = "tool_calls" if parsers[event.index].num_calls else event.finish_reason
                yield {**head, "choices": [_chunk(event.index, {}, None, reason)]}

    async def _whole(
        self, job: Job, asked: ChatBody, parsers: list[MessageParser], head: dict[str, Any]
    ) -> dict[str, Any]:
        found = await collected(
            job, lambda event: deltas_of(parsers[event.index], event), keep_special=parsers[0].keeps_special
        )
        choices = []
        for index, (delta, entries, reason) in enumerate(found):
            message = {"role": "assistant", "content": "", **delta}
            if parsers[index].num_calls:
                message["content"], reason = message["content"] or None, "tool_calls"
            choices.append({
                "index": index, "message": message, "logprobs": _logprobs(asked, entries), "finish_reason": reason,
            })  # fmt: skip
        return {**head, "choices": choices, "usage": usage(job)}


def _tools(asked: ChatBody, body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call; with tool_choice="none" there are none."""
    return None if asked.tool_choice == "none" else body.get("tools") or None


def deltas_of(parser: MessageParser, event: Event) -> list[dict[str, Any]]:
    """Return the deltas that an event of its choice adds to a message."""
    found = parser.feed(event.text)
    if event.finish_reason is not None:
        found += parser.end()
        if parser.is_broken and event.finish_reason == "stop":
            found += parser.unread()
    return found


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(asked: ChatBody, entries: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """Return log-probabilities in the form of the chat API: an entry for each token."""
    if asked.num_logprobs is None:
        return None
    content = [
        {**_token(entry.text, entry.logprob), "top_logprobs": [_token(*found) for found in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    """Return the entry of a token. bytes: None for a part of a character, whose bytes are not known from its text."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


class MessageParser:
    """Finds thoughts and calls of tools in the text of one choice, by the parser that transformers has for the model.

    Without one, all text is content. events: those of transformers' ResponseParser.
    """

    def __init__(self, parser: Any, request_id: str, index: int) -> None:
        self._parser, self._name = parser, f"{request_id}_{index}"
        self.keeps_special = parser is not None  # it knows thoughts and calls by special tokens
        self._begun = False
        self.is_broken = False  # its end was not understood
        self.num_calls = 0

    @classmethod
    def of(
        cls,
        service: Service,
        prompt: list[int],
        tools: list[dict[str, Any]] | None,
        *,
        request_id: str,
        index: int = 0,
    ) -> MessageParser:
        """Return the parser for choice `index` of a request that gave the model `tools`."""
        more = known_keywords(build_response_parser, {"tools": tools})
        return cls(build_response_parser(service.tokenizer, service.engine.model, prompt, **more), request_id, index)

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return the deltas of a message that a piece of text brings."""
        if self._parser is None:
            return [{"content": text}] if text else []
        events = [] if self._begun else list(self._parser.initial_events)
        self._begun = True
        return self._deltas([*events, *(self._parser.feed(text) if text else ())])

    def end(self) -> list[dict[str, Any]]:
        """Return the deltas that the end of the text brings."""
        if self._parser is None:
            return []
        before = self.feed("")
        try:
            _, events = self._parser.finalize()
        except (ValueError, RuntimeError) as error:  # the text ends within a call, most likely at max_tokens
            logger.warning(f"the end of a message was not understood, and is left out: {error}")
            self.is_broken, events = True, []
        return before + self._deltas(events)

    def unread(self) -> list[dict[str, Any]]:
        """Return the deltas of an end that was not understood, and that no limit of tokens has cut off."""
        return []

    def _deltas(self, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._joined(response_events_to_chunks(list(events)))

    def _joined(self, items: Iterable[Any]) -> list[dict[str, Any]]:
        """Return the deltas of texts, thoughts and calls."""
        found: list[dict[str, Any]] = []
        for item in items:
            if isinstance(item, ToolCall):
                call = {"name": item.name, "arguments": item.arguments}
                number = {"index": self.num_calls, "id": f"call_{self._name}_{self.num_calls}", "type": "function"}
                found.append({"tool_calls": [{**number, "function": call}]})
                self.num_calls += 1
            else:
                found.append({"reasoning_content" if isinstance(item, ReasoningText) else "content": str(item)})
        return found


class CalledParser(MessageParser):
    """Reads the calls of an answer that consists of them; they come at its end."""

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(None, request_id, index)
        self._text = ""

    def feed(self, text: str) -> list[dict[str, Any]]:
        self._text += text
        return []

    def end(self) -> list[dict[str, Any]]:
        try:
            calls = read_calls(self._text)
        except ValueError:  # it was cut off
            self.is_broken = True
            return []
        return self._joined([ToolCall(name=name, arguments=arguments) for name, arguments in calls])

    def unread(self) -> list[dict[str, Any]]:
        return [{"content": self._text}] if self._text else []  # a stop string has ended it


def parser_for(
    service: Service,
    asked: ChatBody | ResponseBody,
    prompt: list[int],
    tools: list[dict[str, Any]] | None,
    *,
    request_id: str,
    index: int = 0,
) -> MessageParser:
    """Return the parser of a choice. An answer that must match something has no thoughts and no calls of its own."""
    if asked.must_call:
        return CalledParser(request_id, index)
    if asked.constraint():
        return MessageParser(None, request_id, index)
    return MessageParser.of(service, prompt, tools, request_id=request_id, index=index)


# -- texts and chats ---------------------------------------------------------------------------------------------


async def collected(
    job: Job, deltas: Callable[[Event], list[dict[str, Any]]], *, keep_special: bool = False
) -> list[tuple[dict[str, Any], list[ScoredToken], str | None]]:
    """Return each choice when all have ended: its deltas joined, the entries of its tokens, and its finish_reason."""
    found: list[dict[str, Any]] = [{} for _ in range(job.num_choices)]
    entries: list[list[ScoredToken]] = [[] for _ in found]
    reasons: list[str | None] = [None for _ in found]
    async for event in job.events(keep_special=keep_special):
        for delta in deltas(event):
            _join(found[event.index], delta)
        entries[event.index] += event.entries
        reasons[event.index] = event.finish_reason
    return list(zip(found, entries, reasons, strict=True))


def _join(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message, as clients do. A whole message has no index in its calls."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = [{key: part for key, part in call.items() if key != "index"} for call in value]
            message[name] = message.get(name, []) + calls
        else:
            message[name] = message.get(name, "") + value


async def with_usage(
    chunks: AsyncIterator[dict[str, Any]], job: Job, asked: Choices, head: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Pass on the chunks of a stream, with the counts of tokens if they were requested.

    head: the fields of each chunk.
    """
    async for chunk in chunks:
        yield {**chunk, "usage": usage(job)} if asked.wants_usage_in_chunks else chunk
    if asked.wants_usage:
        yield {**head, "choices": [], "usage": usage(job)}


def usage(job: Job) -> dict[str, int]:
    """Return the counts of tokens of a request; prompts count once, whatever n is."""
    prompt, new = job.num_prompt_tokens, job.num_new_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
