"""Service: one model with its Engine, and the way of a request through them. It knows nothing of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar

from ..errors import HfAccelError, OutOfBlocksError, UnsupportedError
from ..generation.engine.stream import Request, Sample
from ..generation.hf import Engine
from ..generation.hf.request_config import stop_token_ids
from ..generation.sampling.stopping import context_of, plain_token
from ..models import layers_config
from .api_errors import ApiError, unavailable
from .bodies import Common, CompletionBody
from .compiling import Compiling
from .hf.templates import Templates
from .limits import Admission, Limits
from .metrics import Metrics
from .token_text import ScoredToken, TokenText

Found = TypeVar("Found")
DEFAULT_NEW_TOKENS = 1024  # of a choice whose request names no number, as in `transformers serve`
RETRY_SECONDS = 5

# What is closed when an HTTP exchange ends, however it ends: the guard sets it, and submit() adds its job.
exchange: ContextVar[ExitStack] = ContextVar("exchange")


@dataclass(frozen=True)
class Event:
    """News of a choice. finish_reason: "stop" or "length" with its last piece of text, else None."""

    index: int
    text: str
    entries: list[ScoredToken]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt that is ready for the engine. ids: its tokens. inputs: what a processor has made besides them."""

    ids: list[int]
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def for_engine(self) -> list[int] | dict[str, Any]:
        """The prompt as Engine.submit takes it."""
        return {**self.inputs, "input_ids": [self.ids]} if self.inputs else self.ids


class Job:
    """The choices of one request while they are computed."""

    def __init__(self, service: Service, asked: Common, num_choices: int) -> None:
        self._service, self._asked = service, asked
        self.num_choices = num_choices
        self.since = monotonic()
        self.requests: list[Request] = []
        self.begun: list[list[int]] = []  # of each request, the tokens behind which its texts go on
        self.num_prompt_tokens = 0
        self.num_new_tokens = 0

    def close(self) -> None:
        """Cancel what still runs, and give the place back."""
        self.cancel()
        self._service.metrics.request_seconds.observe(monotonic() - self.since)
        self._service.admission.leave(self)

    def cancel(self) -> None:
        for request in self.requests:
            request.cancel()

    async def events(self, *, keep_special: bool = False) -> AsyncIterator[Event]:
        """Iterate over the news of all choices as they come; each ends with a finish_reason.

        keep_special: whether special tokens have text. Raises ApiError: 503 if the engine broke or the server ends.
        """
        begun = zip(self.requests, self.begun, strict=True)
        samples = [(sample, before) for request, before in begun for sample in request.samples]
        parts = [self._choice(index, *one, keep_special=keep_special) for index, one in enumerate(samples)]
        async for event in parts[0] if len(parts) == 1 else _merged(parts):
            yield event

    async def _choice(
        self, index: int, sample: Sample, before: list[int], *, keep_special: bool
    ) -> AsyncIterator[Event]:
        text = TokenText(
            self._service.tokenizer, self._service.stops(self._asked), keep_special=keep_special, before=before,
            with_space=_goes_on(self._asked),
        )  # fmt: skip
        last, is_first = self.since, True
        try:
            async for tokens, logprobs in sample.pieces():
                now = monotonic()
                self._service.metrics.tokens(len(tokens), now - last, first=is_first)
                last, is_first = now, False
                self.num_new_tokens += len(tokens)
                piece, entries = text.feed(tokens, logprobs)
                if piece or entries:
                    yield Event(index, piece, entries)
        except Exception as error:
            raise self._service.failure(error) from error
        if sample.finish_reason == "cancelled":
            raise unavailable("the server is shutting down, and the answer is not complete", RETRY_SECONDS)
        yield Event(index, *text.end(), sample.finish_reason)


class Computing(Protocol):
    """It computes for a service: an Engine, or a queue of rows."""

    @property
    def model(self) -> Any: ...

    @property
    def stats(self) -> dict[str, Any]: ...

    @property
    def is_live(self) -> bool: ...

    def close(self, *, wait: bool) -> None: ...


def _ended(work: Callable[[], Found]) -> Found:
    """Call work, and let it end in no StopIteration, which a future cannot hold: its request would wait for ever."""
    try:
        return work()
    except StopIteration as error:  # as processors of images raise it, such as LLaVA's of transformers 5.17
        raise ValueError("a place stands there for an image, or for another value, that was not sent") from error


class ModelService:
    """One model that is served, whatever it answers. engine: computes what is asked.

    name: what clients call the model. tokenizer: a fast one. processor: makes prompts of texts with images; None for a
    model that takes none.
    All methods are for the event loop of the server.
    """

    def __init__(self, engine: Computing, tokenizer: Any, name: str, limits: Limits) -> None:
        self.tokenizer, self.name, self.limits = tokenizer, name, limits
        self._computing = engine
        self.processor: Any = None
        self.admission = Admission(limits)
        self.metrics = Metrics(engine, name)
        self.templates = Templates(4 * limits.max_body_bytes)
        # One thread, so that no tokenizer is used twice at a time, and a long prompt does not stop the streams.
        self._tokenizing = ThreadPoolExecutor(1, "hf_accel tokenizer")
        self.compiling = Compiling()

    @property
    def engine(self) -> Any:
        """The Engine, or the queue of rows, that computes."""
        return self._computing

    @property
    def context(self) -> int | None:
        """The tokens of the longest text for the model; None if its config does not say."""
        found = getattr(layers_config(self.engine.served.config), "max_position_embeddings", None)
        return None if found is None else int(found)

    def unready(self) -> str | None:
        """Return why no request is taken now; None if requests are taken."""
        if not self.engine.is_live:
            return "the engine has ended; restart the server"
        return "the server is shutting down" if self.admission.draining else None

    def require_ready(self, num_choices: int) -> None:
        """Raise ApiError if a request would not be admitted now: before the work of reading its prompt."""
        self.admission.require_room(num_choices)
        if not self.engine.is_live:
            raise unavailable("the engine has ended; the server must be restarted", RETRY_SECONDS)

    @property
    def names(self) -> list[str]:
        """The names that clients may ask for."""
        return [self.name]

    @property
    def has_encoder(self) -> bool:
        """True if an encoder reads the prompts, and the answers begin without them."""
        return bool(self.engine.served.config.is_encoder_decoder)

    def ids(self, text: str, **how: Any) -> list[int]:
        """Return the tokens of a text. how: keywords of the tokenizer. Raises ApiError (400) for what is no text."""
        try:
            ids: list[int] = self.tokenizer(text, **how)["input_ids"]
        except Exception as error:  # such as half of a surrogate pair, which JSON can name and UTF-8 cannot
            raise ApiError(400, "prompt is a text that the tokenizer cannot read", field="prompt") from error
        return ids

    async def in_thread(self, work: Callable[[], Found]) -> Found:
        """Run tokenization outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, _ended, work)

    def failure(self, error: BaseException) -> ApiError:
        """Return the error that a client gets when its choice has failed with `error`."""
        if not self.engine.is_live:
            return unavailable(f"the engine has ended: {error}", RETRY_SECONDS)
        status = 400 if isinstance(error, UnsupportedError) else 500
        return ApiError(status, f"the request failed: {error}")

    def close(self) -> None:
        """End the engine, and with it all requests."""
        self.templates.close()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self.compiling.close()
        self.engine.close(wait=False)


class Service(ModelService):
    """A model that writes text, by an Engine."""

    def __init__(self, engine: Engine, tokenizer: Any, name: str, limits: Limits, *, processor: Any = None) -> None:
        super().__init__(engine, tokenizer, name, limits)
        self.processor = processor

    @property
    def engine(self) -> Engine:
        found: Engine = super().engine
        return found

    @property
    def names(self) -> list[str]:
        """The names of the model, and of the adapters that are loaded for it."""
        return [self.name, *self.engine.adapters.names]

    def stops(self, asked: Common) -> list[str]:
        """Return the strings that end the text: the request's, or else those of the model's generation_config."""
        own = self.engine.served.generation_config.stop_strings or []
        return asked.stops or ([own] if isinstance(own, str) else list(own))

    def submit(self, asked: Common, prompts: Sequence[Prompt]) -> Job:
        """Submit a choice, or several, for each prompt.

        Raises ApiError: 400 for what cannot be served, 429 if there is no room, 503 if the engine has ended.
        """
        limits = [self._new_tokens(asked, len(prompt)) for prompt in prompts]
        keywords = {**self._sampling(asked), **asked.constraint()}
        job = Job(self, asked, len(prompts) * asked.num_choices)
        self.admission.admit(job)
        exchange.get().callback(job.close)
        for prompt, limit in zip(prompts, limits, strict=True):
            job.requests.append(self._submit(prompt, limit, asked, keywords))
            job.begun.append(self._before(prompt, asked))
            job.num_prompt_tokens += len(prompt)
        self.metrics.prompt_tokens.inc(job.num_prompt_tokens)
        return job

    def _before(self, prompt: Prompt, asked: Common) -> list[int]:
        """Return the tokens behind which the text of an answer goes on; see TokenText.

        What must match something is matched with the space that stands before it, whatever the prompt ends with.
        """
        if asked.constraint():
            return plain_token(self.tokenizer)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        return [] if self.has_encoder else context_of(decode, prompt.ids)

    def _sampling(self, asked: Common) -> dict[str, Any]:
        """Return the keywords of a request for Engine.submit.

        The model's generation_config gives the settings that the request does not. If it is greedy, a request that
        needs sampling has the default temperature of OpenAI's API.
        """
        keywords, config = asked.sampling(), self.engine.served.generation_config
        if "temperature" not in keywords and not config.do_sample and asked.asks_for_samples:
            keywords["temperature"] = 1.0
        own = stop_token_ids(self.engine.served) if asked.stops_at_end else ()
        keywords["stop_token_ids"] = [*keywords.get("stop_token_ids", ()), *own]
        keywords["adapter"] = None if asked.model in (None, self.name) else asked.model
        keywords["num_beams"] = 1  # a client cannot ask for more, and a model's own beams are none of an engine
        if asked.num_logprobs is not None:
            keywords["logprobs"] = asked.num_logprobs
        return keywords

    def _submit(self, prompt: Prompt, limit: int, asked: Common, keywords: dict[str, Any]) -> Request:
        try:
            return self.engine.submit(
                prompt.for_engine, max_new_tokens=limit, stop=self.stops(asked), n=asked.num_choices, **keywords
            )
        except (UnsupportedError, OutOfBlocksError) as error:
            raise ApiError(400, str(error)) from error
        except HfAccelError as error:
            raise unavailable(str(error), RETRY_SECONDS) from error

    def _new_tokens(self, asked: Common, num_prompt: int) -> int:
        """Return the most new tokens after a prompt. Raises ApiError (400) beyond the limits."""
        if not num_prompt:
            raise ApiError(400, "the prompt has no tokens; send at least one")
        longest, context, most = self.limits.max_prompt_tokens, self.context, self.limits.max_new_tokens
        if longest is not None and num_prompt > longest:
            raise ApiError(400, f"the prompt has {num_prompt} tokens; this server takes {longest}")
        # Of a source the context of the encoder holds all; an answer to it has one of its own, with a token to begin.
        taken = 1 if self.has_encoder else num_prompt
        if context is not None and num_prompt + (not self.has_encoder) > context:
            raise ApiError(400, f"the prompt has {num_prompt} tokens; the model's context holds {context}")
        wanted = asked.new_tokens
        if wanted is not None and most is not None and wanted > most:
            raise ApiError(400, f"{wanted} new tokens are asked for; this server gives {most} a request")
        if wanted is not None and context is not None and taken + wanted > context:
            message = f"the prompt has {taken} tokens and {wanted} are asked for; the context holds {context}"
            raise ApiError(400, message)
        room = DEFAULT_NEW_TOKENS if context is None else context - taken
        return wanted or min(DEFAULT_NEW_TOKENS, room, most or DEFAULT_NEW_TOKENS)


def _goes_on(asked: Common) -> bool:
    """Return whether a text is what follows another one, or must match something, so that a space before it counts."""
    return isinstance(asked, CompletionBody) or bool(asked.constraint())


async def _merged(parts: Sequence[AsyncIterator[Event]]) -> AsyncIterator[Event]:
    """Iterate over the events of all parts in the order in which they come. Raises the first error of any part."""
    arrived: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    async def run(part: AsyncIterator[Event]) -> None:
        try:
            async for event in part:
                arrived.put_nowait(event)
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(run(part)) for part in parts]
    try:
        left = len(tasks)
        while left:
            found = await arrived.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
