"""/v1/completions: the continuation of a text, or of several."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from transformers.cli.serving.completion import CompletionHandler

from ..api_errors import ApiError
from ..bodies import CompletionBody
from ..service import Job
from ..token_text import ScoredToken
from .handlers import OfEngine, event_stream, usage, with_usage


class Completions(OfEngine, CompletionHandler):
    """transformers' handler of completions, with several prompts, n, log-probabilities and checked fields."""

    body_type = CompletionBody

    async def _prompts(self, asked: CompletionBody, body: dict[str, Any]) -> list[list[int]]:
        if len(asked.prompts) > self.service.limits.most_choices or not asked.prompts:
            message = f"prompt holds {len(asked.prompts)} prompts; send 1 to {self.service.limits.most_choices}"
            raise ApiError(400, message, field="prompt")
        return await self.service.in_thread(
            lambda: [self._ids(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
        )

    def _ids(self, text: str) -> list[int]:
        try:
            ids: list[int] = self.service.tokenizer(text)["input_ids"]
        except Exception as error:  # such as half of a surrogate pair, which JSON can name and UTF-8 cannot
            raise ApiError(400, "prompt is a text that the tokenizer cannot read", field="prompt") from error
        return ids

    async def _answer(
        self, asked: CompletionBody, body: dict[str, Any], prompts: list[list[int]], request_id: str
    ) -> Response:
        job = self.service.submit(asked, prompts)
        head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.service.name,
        }
        if asked.stream:
            return event_stream(with_usage(self._events(job, asked, head), job, asked, head))
        texts, entries = [""] * job.num_choices, [list[ScoredToken]() for _ in range(job.num_choices)]
        reasons: list[str | None] = [None] * job.num_choices
        async for event in job.events():
            texts[event.index] += event.text
            entries[event.index] += event.entries
            reasons[event.index] = event.finish_reason
        choices = [
            _choice(index, texts[index], _logprobs(asked, entries[index]), reasons[index])
            for index in range(job.num_choices)
        ]
        return JSONResponse({**head, "choices": choices, "usage": usage(job)})

    async def _events(self, job: Job, asked: CompletionBody, head: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for event in job.events():
            found = _logprobs(asked, event.entries) if event.entries else None
            yield {**head, "choices": [_choice(event.index, event.text, found, event.finish_reason)]}


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(asked: CompletionBody, entries: Sequence[ScoredToken]) -> dict[str, Any] | None:
    """Return log-probabilities in the form of the completions API: a list for each kind of fact."""
    if asked.num_logprobs is None:
        return None
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [dict(entry.top) for entry in entries],
        "text_offset": [entry.start for entry in entries],
    }
