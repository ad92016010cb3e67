"""transformers' interface for continuous batching, served by the loop that serves the Engine."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import abc, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from ...config import CacheConfig
from ...errors import HfAccelError, UnsupportedError
from ...state import state_of
from ..sampling.logprobs import TokenLogprobs
from ..serving.engine_loop import EngineLoop
from .factory import Reply, SequenceFactory, complete_config, session_settings
from .session import Session

logger = logging.get_logger(__name__)
QUEUE_SECONDS = 10  # that add_request waits for a place in the queue, as transformers' own does
GLANCE = 0.1  # seconds between two looks at whether there is still somebody who computes


class Outputs:
    """Results that nobody has a handler for, until they are asked for by name or in order."""

    def __init__(self) -> None:
        self._outputs: deque[GenerationOutput] = deque()
        self._changed = threading.Condition()

    def put(self, output: GenerationOutput) -> None:
        with self._changed:
            self._outputs.append(output)
            self._changed.notify_all()

    def empty(self) -> bool:
        return not self._outputs

    def take(self, request_id: str | None, seconds: float) -> GenerationOutput | None:
        """The first of this request, or of any; None if none comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._place(request_id) is not None, seconds)
            place = self._place(request_id)
            if place is None:
                return None
            output = self._outputs[place]
            del self._outputs[place]
            return output

    def _place(self, request_id: str | None) -> int | None:
        return next((i for i, o in enumerate(self._outputs) if request_id in (None, o.request_id)), None)


@dataclass(eq=False)
class Delivery:
    """Hands on what comes of one sequence: each step of it if it is streamed, or the whole at its end."""

    request_id: str
    reply: Reply
    streaming: bool
    deliver: Callable[[GenerationOutput], None]
    on_start: Callable[[], None]
    on_end: Callable[[Delivery], None]
    begun: bool = False

    def put(self, tokens: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprobs] | None = None) -> None:
        self._begin()
        self.reply.take(tokens, logprobs)
        if self.streaming and not self.reply.sequence.is_finished:
            self.deliver(self.reply.output())

    def finish(self, reason: str) -> None:
        """What was cancelled brings nothing more, as with transformers' own."""
        self._begin()
        self.on_end(self)
        if reason != "cancelled":
            self.deliver(self.reply.output())

    def fail(self, error: BaseException) -> None:
        self.reply.error = error
        self.finish("failed")

    def orphan(self, error: BaseException) -> None:
        self.fail(error)

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.on_start()


class ContinuousManager(ContinuousBatchingManager):
    """What init_continuous_batching of a patched model returns, under transformers' names.

    Requests are computed from start() to stop(). The model goes on serving generate() meanwhile, and its prefixes
    stay known for the next start() where stop(keep_for_next_session=True) kept the manager.

    Raises UnsupportedError for what the configs ask for and cannot be met, in the call that asks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None,
        continuous_batching_config: ContinuousBatchingConfig | None,
    ) -> None:
        state = state_of(model).generation
        settings = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
        self.model: Any = model
        self.continuous_batching_config = settings or ContinuousBatchingConfig()
        self.generation_config = complete_config(model, generation_config, "init_continuous_batching()", {})
        self.session = Session(
            model, speculative=state.speculative, **session_settings(settings, state.cache or CacheConfig())
        )
        self.output_router = OutputRouter()
        self.output_router.output_queue = Outputs()  # type: ignore[assignment]
        self.warmed_up = False
        self._factory = SequenceFactory(model, settings)
        self._configs: dict[str, GenerationConfig] = {}
        self._loop: EngineLoop | None = None
        self._stops_hard = False
        self._under_way: dict[str, list[Delivery]] = {}
        self._early: list[list[Delivery]] = []  # came before start()
        self._count, self._lock = 0, threading.RLock()
        size = getattr(self.continuous_batching_config, "max_queue_size", 0)
        self._places = threading.BoundedSemaphore(size) if size else None
        state.engines.add(self)
        state.statistics = {"loop": "ragged"}

    def __repr__(self) -> str:
        return f"hf_accel.ContinuousManager({type(self.model).__name__}: {len(self._under_way)} requests)"

    @property
    def is_live(self) -> bool:
        return self.is_running()

    # -- start and stop --------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return self._loop is not None and self._loop.is_running

    def warmup(self) -> None:
        """There is nothing to capture in advance."""
        self.warmed_up = True

    def start(self) -> None:
        with self._lock:
            if self.is_running():
                logger.warning("Manager thread is already running.")
                return
            self._loop, self._stops_hard = EngineLoop(self.session), False
            self._loop.start()
            early, self._early = self._early, []
            for deliveries in early:
                self._submit(deliveries)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take on nothing more. block: wait for the requests under way, at most `timeout` seconds. hard_stop: they
        fail instead. keep_for_next_session: init_continuous_batching returns this manager again."""
        loop, state = self._loop, state_of(self.model).generation
        if loop is None:
            logger.warning("Manager not started.")
            return
        self._stops_hard = hard_stop
        if block:
            loop.close(wait=not hard_stop, timeout=timeout)
        else:
            loop.retire(cancel=hard_stop)
        if loop.is_running:
            logger.warning(f"Generation thread did not exit after join timeout ({timeout}).")
        state.statistics = {"loop": "ragged", **dataclasses.asdict(loop.totals), **self.session.statistics()}
        state.manager = self if keep_for_next_session else None

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        if self._loop is not None:
            self._loop.close(wait=True, timeout=timeout)

    def destroy(self) -> None:
        if self.is_running():
            self.stop(block=True)
        state_of(self.model).generation.manager = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No pass is computed within the block, as to write into the weights; requests go on after it."""
        if self._loop is None:
            raise HfAccelError("cannot pause a manager that was not started; call start()")
        with self._loop.pause():
            yield

    # -- requests --------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """As transformers' own; logit_processor_kwargs may be any field of GenerationConfig."""
        asked = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        asked = {name: value for name, value in asked.items() if value is not None} | logit_processor_kwargs
        with self._lock:
            name = request_id if request_id is not None else f"req_{self._count}"
            self._count += request_id is None
            if name in self._under_way:
                raise UnsupportedError(f"request_id={name!r} is under way already; give each request its own")
        replies = self._factory.make(
            name, input_ids, self._config(asked), timestamps=record_timestamps, what=f"the prompt of {name!r}"
        )
        self._take_place()
        deliver, ended = self.output_router.deliver, self._ended
        deliveries = [Delivery(name, reply, streaming, deliver, lambda: None, ended) for reply in replies]
        deliveries[-1].on_start = self._give_place
        with self._lock:
            self._under_way[name] = deliveries
            if self._loop is None:
                self._early.append(deliveries)
            else:
                self._submit(deliveries)
        return name

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        names = [
            self.add_request(
                ids,
                max_new_tokens=max_new_tokens,
                streaming=streaming,
                record_timestamps=record_timestamps,
                **logit_processor_kwargs,
            )
            for ids in inputs
        ]
        return [name for name in names if name is not None]

    def cancel_request(self, request_id: str) -> None:
        """End a request, its samples included. One that has ended, or never was, is left as it is."""
        with self._lock:
            for delivery in list(self._under_way.get(request_id, ())):
                if self._loop is None:
                    delivery.finish("cancelled")
                else:
                    self._loop.cancel(delivery.reply.sequence)
            self._early = [waiting for waiting in self._early if waiting[-1].reply.name != request_id]

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next result, of this request if one is named; None after `timeout` seconds, or if none can come."""
        outputs: Any = self.output_router.output_queue
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = GLANCE if end is None else min(GLANCE, end - time.monotonic())
            running = self.is_running()  # before the look: what comes last is not missed
            output: GenerationOutput | None = outputs.take(request_id, max(0.0, left))
            if output is not None or not running or (end is not None and time.monotonic() >= end):
                return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the manager stops."""
        while self.is_running() or not self.output_router.output_queue.empty():
            result = self.get_result(timeout=GLANCE)
            if result is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Any:
        """Results of one request, until it ends."""
        while self.is_running() or request_id in self._under_way:
            result = self.get_result(request_id, timeout=GLANCE)
            if result is not None:
                yield result
            if result is not None and result.is_finished():
                return

    # -- underneath ------------------------------------------------------------------------------------

    def _config(self, asked: dict[str, Any]) -> GenerationConfig:
        """Requests that ask for the same share one, and so what is made of it."""
        key = repr(sorted(asked.items()))
        if key not in self._configs:
            self._configs[key] = complete_config(self.model, self.generation_config, "add_request()", asked)
        return self._configs[key]

    def _submit(self, deliveries: list[Delivery]) -> None:
        assert self._loop is not None
        try:
            self._loop.submit(deliveries[-1].reply.sequence, {one.reply.sequence: one for one in deliveries})
        except BaseException:
            for one in deliveries:
                self._ended(one)
            self._give_place()
            raise

    def _ended(self, delivery: Delivery) -> None:
        if self._stops_hard and delivery.reply.sequence.finish_reason == "cancelled":
            delivery.reply.error = HfAccelError("the manager was stopped before the request had ended")
            self.output_router.deliver(delivery.reply.output())
        with self._lock:
            under_way = self._under_way[delivery.request_id]
            under_way.remove(delivery)
            if not under_way:
                del self._under_way[delivery.request_id]

    def _take_place(self) -> None:
        if self._places is not None and not self._places.acquire(timeout=QUEUE_SECONDS):
            raise queue.Full(f"{self.continuous_batching_config.max_queue_size} requests wait; try again later")

    def _give_place(self) -> None:
        if self._places is not None:
            self._places.release()
