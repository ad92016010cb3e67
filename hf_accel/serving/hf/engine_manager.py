"""Our Engine in the place of transformers' own generation: what its handler of responses calls."""

from __future__ import annotations

import asyncio
from typing import Any

from transformers.cli.serving.utils import (
    BaseGenerateManager,
    _StreamError,
    response_events_to_chunks,
)

from ..api_errors import ApiError
from ..service import Job, Service


class JobStreamer:
    """What transformers' handlers ask of a streamer: the count of tokens, and a way to end it."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def total_tokens(self) -> int:
        return self._job.num_new_tokens

    def cancel(self) -> None:
        self._job.cancel()


class EngineManager(BaseGenerateManager):
    """transformers' interface of what generates, over the Service.

    There is one for each request. A generation config is here the ResponseBody of the request: its handler hands on
    what it is given.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._job: Job | None = None
        self.failure: ApiError | None = None  # why there is no answer

    @property
    def is_cut_off(self) -> bool:
        """True if the answer has ended because it had as many tokens as it may have."""
        return self._job is not None and self._job.requests[0].finish_reason == "length"

    def generate_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:  # fmt: skip
        """Submit a request; what it says arrives in the queue, and None at its end. Returns it with a JobStreamer."""
        job = self._job = self._service.submit(gen_config, [inputs["input_ids"]])
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        job.task = asyncio.create_task(self._pump(job, arrived, response_parser))
        return arrived, JobStreamer(job)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """A whole answer is made of a streamed one."""
        raise NotImplementedError

    def stop(self) -> None:
        """Do nothing: the Service ends its Engine."""

    async def _pump(self, job: Job, arrived: asyncio.Queue[Any], parser: Any) -> None:
        """Put the text of a job, or what a parser makes of it, into a queue."""

        def put(items: Any) -> None:
            for item in items:
                arrived.put_nowait(item)

        try:
            if parser is not None:
                put(response_events_to_chunks(parser.initial_events))
            async for event in job.events(keep_special=parser is not None):
                if event.text:
                    put([event.text] if parser is None else response_events_to_chunks(parser.feed(event.text)))
            put([*self._end(parser), None])
        except Exception as error:  # whoever reads the queue would wait for ever
            known = error if isinstance(error, ApiError) else ApiError(500, f"the server failed: {error!r}")
            self.failure = known
            put([_StreamError(known.message)])

    def _end(self, parser: Any) -> list[Any]:
        """What the end of the text brings. Raises ApiError for an answer that ends by itself within a call."""
        if parser is None:
            return []
        try:
            found: list[Any] = response_events_to_chunks(parser.finalize()[1])
        except (ValueError, RuntimeError) as error:
            if not self.is_cut_off:
                raise ApiError(500, f"the end of the answer was not understood: {error}") from error
            return []
        return found
