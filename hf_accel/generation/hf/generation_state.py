"""What patch() leaves on a model for its generate."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ...cache.hf import PagedCache
from ...config import CacheConfig, SpeculativeConfig
from ...errors import UnsupportedError
from ..speculation.controller import Controller

# (model, weights) -> a patched model over the same Parameters, which the given one does not notice
MakeDraft = Callable[[PreTrainedModel, str | None], PreTrainedModel]

# a patched model -> another one over the same Parameters, with the attention that the model has without us
MakeAttending = Callable[[PreTrainedModel], PreTrainedModel]


@dataclass
class CallState:
    """One call of generate(). insists: speculation was asked for in it, so that it must not be left out silently.

    cache: that it runs over, if it is ours; own_cache: nobody else holds it. prompt_columns: of the input.
    """

    speculative: SpeculativeConfig | None = None
    insists: bool = False
    cache: PagedCache | None = None
    own_cache: bool = False
    prompt_columns: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoopCall:
    """What generate() of transformers has prepared for its loop, and what we do there.

    input_ids: [B, T], left-padded where the mask [B, T] is 0. inputs: what the model is called with besides. streams:
    the user's streamers, or a streamer of stock's. speculative: None for plain decoding.
    """

    model: PreTrainedModel
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: Any
    inputs: dict[str, Any]
    synced_gpus: bool
    streams: Any
    speculative: SpeculativeConfig | None

    @property
    def mask(self) -> Tensor | None:
        return self.inputs.get("attention_mask")

    @property
    def cache(self) -> Any:
        return self.inputs.get("past_key_values")

    @property
    def num_columns(self) -> int:
        return self.input_ids.shape[1]

    @property
    def repeats(self) -> int:
        """How many rows in a row are samples of one prompt."""
        return self.config.num_return_sequences or 1

    @property
    def pad_token(self) -> int:
        pad = self.config._pad_token_tensor
        return 0 if pad is None else int(pad)


@dataclass
class GenerationState:
    """What generate() of one patched model needs to know, and what it last did.

    patch_id: tells this patch from an earlier one of the same Parameters, whose quantized weights were others.
    speculative: for calls that do not say. ragged_refusal: why this model cannot compute all tokens in one ragged row.
    invariant_rows: the most rows that its linears round as they round one; None for any number.
    make_draft: makes draft models; drafts: those made, by what they were made of. controllers: what earlier calls have
    learnt, while no call uses it. calls: of generate() that are under way, by thread. make_attending: makes a model
    that attends as without us; attending: the last one, and the weights that it was made of. warned: what was said
    aloud. engines: made for this model. manager: the one that was kept for the next session.
    """

    cache: CacheConfig | None
    speculative: SpeculativeConfig | None = None
    ragged_refusal: str | None = None
    invariant_rows: int | None = None
    make_draft: MakeDraft | None = None
    patch_id: bytes = field(default_factory=lambda: os.urandom(16))
    calls: dict[int, CallState] = field(default_factory=dict)
    drafts: dict[Any, Any] = field(default_factory=dict)
    controllers: dict[tuple[Any, ...], Controller] = field(default_factory=dict)
    make_attending: MakeAttending | None = None
    attending: tuple[bytes, PreTrainedModel] | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    manager: Any = None
    engines: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # weak: one that is forgotten serves nobody

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "drafts": {},
            "controllers": {},
            "calls": {},
            "engines": None,
            "attending": None,
            "manager": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"engines": weakref.WeakSet()})

    def require_idle(self, what: str) -> None:
        """Raise UnsupportedError while an Engine runs the model, which would go on over another one."""
        for engine in list(self.engines):
            if engine.is_live:
                raise UnsupportedError(f"{what} while {engine!r} runs the model; call engine.close() first")

    @property
    def call(self) -> CallState | None:
        """The call of generate() that this thread is in."""
        return self.calls.get(threading.get_ident())

    @contextmanager
    def calling(self, call: CallState) -> Iterator[None]:
        """For the length of a call; calls may be nested, and threads are apart."""
        thread = threading.get_ident()
        outer, self.calls[thread] = self.calls.get(thread), call
        try:
            yield
        finally:
            if outer is None:
                del self.calls[thread]
            else:
                self.calls[thread] = outer

    def record(self, new_tokens: int, sequences: int, seconds: float, more: dict[str, Any]) -> None:
        """Statistics of a finished run."""
        self.statistics = {
            "seconds": seconds,
            "sequences": sequences,
            "new_tokens": new_tokens,
            "tokens_per_second": new_tokens / seconds,
            **more,
        }
