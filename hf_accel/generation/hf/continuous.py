"""transformers' manager interface for continuous batching, on the loop that serves the Engine too."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import abc, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils import logging

from ...errors import HfAccelError, UnsupportedError
from ...models import layers_config
from ...undo.state import state_of
from ..engine.engine_loop import EngineLoop, make_loop
from ..sampling.choice import TokenLogprobs
from .batch import BatchPrompt, Reply, SequenceFactory, session_settings
from .config_settings import complete_config
from .generation_state import GenerationState
from .model_runner import attention_refusal, weights_salt
from .refusals import ids_refusal, ragged_refusal, warn_of_code
from .session import Session

logger = logging.get_logger(__name__)
QUEUE_SECONDS = 10  # how long add_request waits for room in the queue, as in transformers
POLL_SECONDS = 0.1  # how often a waiting reader checks that the manager still runs


class Outputs:
    """A queue of results for which the program has set no handler. It can also return the results of one request."""

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
        """Remove and return the first result of this request, or of any; None if there is none within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._index(request_id) is not None, seconds)
            index = self._index(request_id)
            if index is None:
                return None
            output = self._outputs[index]
            del self._outputs[index]
            return output

    def _index(self, request_id: str | None) -> int | None:
        return next((i for i, o in enumerate(self._outputs) if request_id in (None, o.request_id)), None)


@dataclass(eq=False)
class Delivery:
    """Delivers the output of one sequence: after each step if `streaming` is set, otherwise only at its end.

    on_start: is called at the first tokens or at the end, whichever comes first. on_end: is called at the end.
    """

    request_id: str
    reply: Reply
    streaming: bool
    deliver: Callable[[GenerationOutput], None]
    on_start: Callable[[], None]
    on_end: Callable[[Delivery], None]
    begun: bool = False

    def put(self, tokens: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprobs] | None = None) -> None:
        self._begin()
        self.reply.record(tokens, logprobs)
        if self.streaming and not self.reply.sequence.is_finished:
            self.deliver(self.reply.output())

    def finish(self, reason: str) -> None:
        """End the delivery. A cancelled request gets no output, as in transformers."""
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
    """The manager that init_continuous_batching of a patched model returns. It has transformers' interface.

    Requests are computed between start() and stop(); generate() can be used meanwhile. If the manager is kept with
    stop(keep_for_next_session=True), cached prefixes are found again after the next start().

    A method raises UnsupportedError if its config asks for something that is not supported.
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
        self.session = Session(model, **session_settings(model, settings, state.speculative))
        self.output_router = OutputRouter()
        self.output_router.output_queue = Outputs()  # type: ignore[assignment]
        self.warmed_up = False
        self._factory = SequenceFactory(model, settings)
        self._configs: dict[str, GenerationConfig] = {}
        self._loop: EngineLoop | None = None
        self._stops_hard = False
        self._active: dict[str, list[Delivery]] = {}  # the deliveries of each request that has not ended
        self._unsubmitted: list[list[Delivery]] = []  # the deliveries of requests that were added before start()
        self._count, self._lock = 0, threading.RLock()
        size = getattr(self.continuous_batching_config, "max_queue_size", 0)
        self._queue_slots = threading.BoundedSemaphore(size) if size else None
        state.engines.add(self)
        state.statistics = {"loop": "ragged"}

    def __repr__(self) -> str:
        return f"hf_accel.ContinuousManager({type(self.model).__name__}: {len(self._active)} requests)"

    @property
    def is_live(self) -> bool:
        return self.is_running()

    # -- start and stop --------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return self._loop is not None and self._loop.is_running

    @property
    def background_thread_status(self) -> Any:  # type: ignore[override]
        """The status that `transformers serve` reads before each request.

        fatal_error: the error that ended the thread, or None.
        """
        return SimpleNamespace(fatal_error=None if self._loop is None else self._loop.error)

    def warmup(self) -> None:
        """Do nothing, because there are no CUDA graphs to capture."""
        self.warmed_up = True

    def start(self) -> None:
        with self._lock:
            if self.is_running():
                logger.warning("Manager thread is already running.")
                return
            self._loop, self._stops_hard = make_loop(self.session), False
            self._loop.start()
            unsubmitted, self._unsubmitted = self._unsubmitted, []
            for deliveries in unsubmitted:
                self._submit(deliveries)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Accept no more requests.

        block: whether to wait until all requests have ended, at most `timeout` seconds. hard_stop: whether the
        requests fail instead of finishing. keep_for_next_session: whether init_continuous_batching returns this
        manager again.
        """
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
        """Compute no pass within the `with` block, for example to change the weights. Requests go on after it.

        Raises HfAccelError if the manager was not started.
        """
        if self._loop is None:
            raise HfAccelError("cannot pause a manager that was not started; call start()")
        with self._loop.pause():
            yield
            self.session.look_again()

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
        """Add a request, as in transformers. logit_processor_kwargs may be any fields of GenerationConfig.

        Raises UnsupportedError for a request_id that is in use and for settings that are not supported, and queue.Full
        if the queue has no room within QUEUE_SECONDS.
        """
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        given = {name: value for name, value in given.items() if value is not None} | logit_processor_kwargs
        with self._lock:
            name = request_id if request_id is not None else f"req_{self._count}"
            self._count += request_id is None
            if name in self._active:
                raise UnsupportedError(f"request_id={name!r} is in use; give each request an id of its own")
        prompt, what = BatchPrompt(input_ids, self._config(given)), f"the prompt of {name!r}"
        replies = self._factory.make(name, prompt, timestamps=record_timestamps, what=what)
        self._acquire_queue_slot()
        deliver, ended = self.output_router.deliver, self._ended
        deliveries = [Delivery(name, reply, streaming, deliver, lambda: None, ended) for reply in replies]
        deliveries[-1].on_start = self._release_queue_slot
        with self._lock:
            self._active[name] = deliveries
            if self._loop is None:
                self._unsubmitted.append(deliveries)
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
        """End a request with all its samples. A request that has ended, or is unknown, is ignored."""
        with self._lock:
            for delivery in list(self._active.get(request_id, ())):
                if self._loop is None:
                    delivery.finish("cancelled")
                else:
                    self._loop.cancel(delivery.reply.sequence)
            self._unsubmitted = [waiting for waiting in self._unsubmitted if waiting[-1].reply.name != request_id]

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Return the next result, of any request or of the given one.

        Returns None after `timeout` seconds, or if the manager does not run and no result is left.
        """
        outputs: Any = self.output_router.output_queue
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if end is None else min(POLL_SECONDS, end - time.monotonic())
            running = self.is_running()  # this is read before the queue, so that the last result is not missed
            output: GenerationOutput | None = outputs.take(request_id, max(0.0, left))
            if output is not None or not running or (end is not None and time.monotonic() >= end):
                return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Iterate over the results until the manager stops."""
        while self.is_running() or not self.output_router.output_queue.empty():
            result = self.get_result(timeout=POLL_SECONDS)
            if result is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Any:
        """Iterate over the results of one request until it ends."""
        while self.is_running() or request_id in self._active:
            result = self.get_result(request_id, timeout=POLL_SECONDS)
            if result is not None:
                yield result
            if result is not None and result.is_finished():
                return

    # -- internals -------------------------------------------------------------------------------------

    def _config(self, given: dict[str, Any]) -> GenerationConfig:
        """Return the complete config of a request. Requests with equal settings share a config and its processors."""
        key = repr(sorted(given.items()))
        if key not in self._configs:
            self._configs[key] = complete_config(self.model, self.generation_config, "add_request()", given)
        return self._configs[key]

    def _submit(self, deliveries: list[Delivery]) -> None:
        assert self._loop is not None
        try:
            handles = {delivery.reply.sequence: delivery for delivery in deliveries}
            self._loop.submit(deliveries[-1].reply.sequence, handles)
        except BaseException:
            for delivery in deliveries:
                self._ended(delivery)
            self._release_queue_slot()
            raise

    def _ended(self, delivery: Delivery) -> None:
        if self._stops_hard and delivery.reply.sequence.finish_reason == "cancelled":
            delivery.reply.error = HfAccelError("the manager was stopped before the request had ended")
            self.output_router.deliver(delivery.reply.output())
        with self._lock:
            active = self._active[delivery.request_id]
            active.remove(delivery)
            if not active:
                del self._active[delivery.request_id]

    def _acquire_queue_slot(self) -> None:
        if self._queue_slots is not None and not self._queue_slots.acquire(timeout=QUEUE_SECONDS):
            raise queue.Full(f"{self.continuous_batching_config.max_queue_size} requests wait; try again later")

    def _release_queue_slot(self) -> None:
        if self._queue_slots is not None:
            self._queue_slots.release()


# -- the choice of the manager: ours, or transformers' own for a model that cannot run ragged -----------------

STOCKS_LAYERS = ("full_attention", "sliding_attention")  # what transformers' manager has pages for


def manager_for(model: PreTrainedModel, generation_config: Any, batching_config: Any, hints: Any) -> Any:
    """Return the manager that was kept for this session, or make a new one."""
    state: GenerationState = state_of(model).generation
    refusal = ragged_refusal(model) or ids_refusal(model)
    if refusal is not None:
        refuse_batching(model)
        state.statistics = {"loop": f"stock: transformers' continuous batching manager, because {refusal}"}
        attending: Any = _model_for_stock(model)
        return GenerationMixin.init_continuous_batching(attending, generation_config, batching_config, hints)
    warn_of_code(model, "continuous batching")
    if state.manager is None:
        return ContinuousManager(model, generation_config, batching_config)
    return state.manager


def refuse_batching(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for a model that transformers' manager cannot serve, of those that cannot run ragged."""
    config: Any = model.config
    kinds = set(getattr(layers_config(config), "layer_types", None) or ()).difference(STOCKS_LAYERS)
    if config.is_encoder_decoder:
        refusal = "is an encoder-decoder, and its prompts are no tokens of its decoder"
    elif kinds or getattr(model, "_is_stateful", False):
        refusal = f"keeps a state that has no pages ({', '.join(sorted(kinds)) or 'recurrent layers'})"
    else:
        return
    raise UnsupportedError(
        "continuous batching (generate_batch(), init_continuous_batching()) cannot serve this model, with hf_accel "
        f"or without: {type(model).__name__} {refusal}; call generate() with a padded batch and its attention_mask"
    )


def destroy_managers(model: PreTrainedModel) -> None:
    """Stop and drop the managers that were kept."""
    state: GenerationState = state_of(model).generation
    if state.manager is not None:
        state.manager.destroy()
    if state.attending is not None:
        attending: Any = state.attending[1]
        state.attending = None
        GenerationMixin.destroy_cached_continuous_batching_manager(attending)


def _model_for_stock(model: Any) -> PreTrainedModel:
    """Return a model for transformers' manager, which calls it in another thread, with the original attention.

    This model keeps our attention meanwhile. The same model is returned as long as weights and adapters are the same,
    because transformers stores a kept manager on it.
    """
    state = state_of(model).generation
    if attention_refusal(model) is not None or state.form.operators is not None:
        return model
    salt = weights_salt(model)
    if state.attending is None or state.attending[0] != salt:
        assert state.make_attending is not None
        model.destroy_cached_continuous_batching_manager()
        state.attending = salt, state.make_attending(model)
    return state.attending[1]
