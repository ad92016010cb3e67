"""What patch() leaves on a model for its generate."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ...cache.hf import PagedCache
from ...config import CacheConfig, SpeculativeConfig
from ..controller import Controller

STATE = "_hf_accel"  # where patch() keeps its GenerationState on the model

# (model, weights) -> a patched model over the same Parameters, which the given one does not notice
MakeDraft = Callable[[PreTrainedModel, str | None], PreTrainedModel]


@dataclass
class CallState:
    """One call of generate(). insists: speculation was asked for in it, so that it must not be left out silently."""

    speculative: SpeculativeConfig | None = None
    insists: bool = False
    streams: Any = None
    statistics: dict[str, Any] = field(default_factory=dict)


@dataclass
class GenerationState:
    """What generate() of one patched model needs to know, and what it last did.

    patch_id: tells this patch from an earlier one of the same Parameters, whose quantized weights were others.
    speculative: for calls that do not say. ragged_refusal: why this model cannot compute all tokens in one ragged row.
    alike_rows: the most rows that its linears round as they round one; None for any number.
    make_draft: makes draft models; drafts: those made, by what they were made of. controllers: what earlier calls have
    learnt, while no call uses it.
    """

    cache: CacheConfig | None
    speculative: SpeculativeConfig | None = None
    ragged_refusal: str | None = None
    alike_rows: int | None = None
    make_draft: MakeDraft | None = None
    patch_id: bytes = field(default_factory=lambda: os.urandom(16))
    last_cache: PagedCache | None = None
    own_cache: bool = False
    call: CallState | None = None
    prompt_columns: int = 0
    drafts: dict[Any, Any] = field(default_factory=dict)
    controllers: dict[tuple[Any, ...], Controller] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"drafts": {}, "controllers": {}, "call": None, "last_cache": None}

    def record(self, new_tokens: int, sequences: int, seconds: float, more: dict[str, Any]) -> None:
        """Statistics of a finished run."""
        self.statistics = {
            "seconds": seconds,
            "sequences": sequences,
            "new_tokens": new_tokens,
            "tokens_per_second": new_tokens / seconds,
            **more,
        }
