"""Decoder layers on a GPU that run by their trace: some of their operations share a launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.hf.forward import attention_forward
from ...cache.hf.layers import LayerOverPages, PagedKV
from ...cache.storage import KVStorage
from ...recognition.operation import UntraceableError
from ...recognition.trace import Trace
from ..joined_layer import JoinedLayer
from ..modules import by_library, computes
from .layer_attention import attention_of, planned_of
from .layer_calls import LayerCalls
from .running_pass import LayerPlace


class JoinedCalls(LayerCalls[JoinedLayer]):
    """The LayerCalls of a layer on a GPU.

    joined: the operations of JOINS that share a launch. following: see JoinedLayer.
    """

    computes = staticmethod(computes)

    def __init__(self, joined: frozenset[str], following: nn.Module | None = None) -> None:
        super().__init__()
        self.joined, self.following = joined, following

    def __reduce__(self) -> Any:
        return JoinedCalls, (self.joined, self.following)

    def make(self, trace: Trace, layer: nn.Module, *, x: Tensor, table_dtype: torch.dtype | None) -> JoinedLayer:
        planned = planned_of(trace, layer)
        if table_dtype is None or trace.stateful is not None:
            raise UntraceableError("one of its steps has no call on a GPU")
        if by_library(x):  # the model was moved to a CPU since
            raise UntraceableError("its operations share launches only on a GPU")
        attention = attention_of(trace, replace(planned.spec, dtype=x.dtype))
        return JoinedLayer(trace, table_dtype, attention, device=x.device, following=self.following)

    def compute(self, programme: JoinedLayer, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Tensor | None:
        storage: KVStorage = pages.group.storage(programme.layer_idx, *programme.written)
        if not programme.fits(storage) or place.group_step.written is not None:
            return None
        step, mask = place.group_step, place.kwargs.get("attention_mask")
        assert place.tables is not None

        def attend(module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Tensor:
            q, k, v = heads
            paged = PagedKV(pages, storage, place.step, step, True, v)
            return attention_forward(module, q, paged.attach(k), v, mask, **options)[0]

        return programme(x, place.tables, storage=storage, slots=step.slots, attend=attend)
