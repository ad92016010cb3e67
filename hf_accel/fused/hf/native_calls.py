"""Decoder layers on the CPU that run by their trace: each is one native call for a pass of few tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.cpu import CpuBackend
from ...attention.hf.bias import table_of
from ...cache.hf.encoder_decoder import tokens_part
from ...cache.hf.layers import CacheOverPages, LayerOverPages
from ...cache.hf.ragged import RaggedCache, SourceLayer
from ...kernels.cpu.attention import NO_BIAS, position_bias_fields
from ...kernels.cpu.layer_call import NO_STATES
from ...kernels.cpu.library import native
from ...kernels.layouts import PositionBias
from ...recognition.call_form import BIAS, POSITION_IDS, SOURCE_BIAS, SOURCE_STATES
from ...recognition.of_positions import behind_tables
from ...recognition.operation import UntraceableError
from ...recognition.trace import Trace
from ..layer_programme import CallFields, LayerPages, LayerProgramme, SourceFields, StateFields
from ..traced_layer import Attention
from .layer_attention import as_called, attend_of, attention_of, planned_of, planned_source, source_attention
from .layer_calls import LayerCalls, cache_of
from .running_pass import LayerPlace


class NativeCalls(LayerCalls[LayerProgramme]):
    """The LayerCalls of a layer on the CPU: one native call for a pass of few tokens."""

    computes = staticmethod(native)

    def __reduce__(self) -> Any:
        return NativeCalls, ()

    def make(self, trace: Trace, layer: nn.Module, *, x: Tensor, table_dtype: torch.dtype | None) -> LayerProgramme:
        if all(operation.kind != "attend" for operation in trace.operations):
            return LayerProgramme(trace, table_dtype, Attention(0.0))
        planned = planned_of(trace, layer)
        attends = attend_of(trace)[0]
        spec = replace(planned.spec, dtype=trace.dtype, bias=attends.values["biased"])
        if trace.taken is not None:
            spec = replace(spec, window=trace.taken_window)
        called = as_called(spec, attends)
        if not isinstance(planned.backend, CpuBackend) or planned.backend.refuses(called) is not None:
            raise UntraceableError("its attention has another backend")
        return LayerProgramme(trace, table_dtype, attention_of(trace, spec), source_attention(trace, planned_source))

    def others(self, programme: LayerProgramme, place: LayerPlace) -> tuple[Tensor | None, ...]:
        """Return the biases that the layer hands on, as it was given them or as this pass has made them."""
        assert programme.others is not None
        cache = cache_of(place.kwargs)
        held = {BIAS: tokens_part(cache), SOURCE_BIAS: getattr(cache, "cross_attention_cache", None)}
        return tuple(
            held[name].given_bias[0] if name in held else cache if name else None for name in programme.others
        )

    def compute(self, programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Tensor | None:
        given = None
        if programme.of_layer is not None:
            given = _given(programme, x, place)
            if given is None:
                return None
        states = NO_STATES
        if programme.state_sizes is not None:
            states = _states(programme, x, pages.cache, place)
        if not programme.written and programme.taken is None:
            if place.fields is None:
                place.fields = CallFields.of(x, None, None, 1)
            return None if given is not None else programme(x, place.fields, LayerPages(None, states=states))
        if programme.taken is None:
            storage = pages.group.storage(programme.layer_idx, *programme.written)
        elif programme.layer_idx in pages.group.storages:
            storage = pages.group.storages[programme.layer_idx]
        else:
            return None
        if not programme.fits(storage):
            return None
        tables, numbers = place.tables, programme.by_position
        if place.fields is not None and numbers not in (None, place.by_position):
            place.fields = None
        if place.fields is None and numbers is not None:
            positions = _positions(programme, x, pages.cache, place)
            if positions is None or tables is None:
                return None
            tables = behind_tables(tables, numbers.of(positions).reshape(positions.shape))
        if place.fields is None:
            place.fields = CallFields.of(x, tables, place.group_step, storage.block_size)
            place.by_position = numbers
        bias = NO_BIAS
        if programme.biased_heads:
            known = _position_bias(programme, pages.cache, place)
            if known is None:
                return None
            bias = position_bias_fields(known, programme.biased_heads, place.group_step.ragged.max_kv)
        if place.whole is None:
            return programme(
                x, place.fields, LayerPages(storage.pages, states=states), bias=bias, adapters=place.adapters,
                given=given,
            )  # fmt: skip
        if not programme.is_one_call or given is not None:
            return None
        if programme.is_source_biased and not _source_is_plain(programme, place.whole.cross_attention_cache, place):
            return None
        source = _source_layer(programme, place)
        held = None if source is None else source.group.storages.get(source.layer_idx)
        if source is None or held is None or not programme.fits_source(storage, held):
            return None
        if place.source_fields is None:
            step = place.step.groups[source.group_index]
            place.source_fields = SourceFields.of(step, held.block_size)
        return programme(x, place.fields, LayerPages(storage.pages, (held.pages, place.source_fields)), bias=bias)


def _given(programme: LayerProgramme, x: Tensor, place: LayerPlace) -> Tensor | None:
    """Return what a layer is given for each token of x [B, T, hidden], [B, T, size]; None if it is not known."""
    assert programme.of_layer is not None
    given = place.of_layer
    if type(given) is not Tensor or given.dtype is not programme.dtype or given.device != x.device:
        return None
    return given.contiguous() if given.shape == (*x.shape[:2], programme.of_layer.stride) else None


def _positions(programme: LayerProgramme, x: Tensor, cache: CacheOverPages, place: LayerPlace) -> Tensor | None:
    """Return the positions of the tokens of x [B, T, hidden], [B or 1, T]; None if they are not known."""
    assert programme.by_position is not None
    if programme.by_position.counted:
        if isinstance(cache, RaggedCache):
            found: Any = cache.positions[None]
        else:
            found = torch.arange(x.shape[1])[None] + cache.get_seq_length(programme.layer_idx)
    else:
        found = place.kwargs.get(POSITION_IDS)
    known = type(found) is Tensor and found.ndim == 2 and found.shape[1] == x.shape[1] and len(found) in (1, len(x))
    return found if known else None


def _states(programme: LayerProgramme, x: Tensor, cache: CacheOverPages, place: LayerPlace) -> tuple[int, ...]:
    """Return the fields of the struct of a call for the states of a layer."""
    layer, sizes = cache.state_layer(programme.layer_idx), programme.state_sizes
    assert sizes is not None
    pages = layer.state_storage(x, sizes).pages
    if place.state_fields is None:
        place.state_fields = StateFields.of(place.step.groups[layer.group_index].own)
    return pages.k.data_ptr(), pages.v.data_ptr(), *place.state_fields.step


def _position_bias(programme: LayerProgramme, cache: CacheOverPages, place: LayerPlace) -> PositionBias | None:
    """Return what a layer adds to the scores of its tokens, see attention/hf/bias.py; None for what is not known."""
    if programme.own_bias is None:
        given, known = cache.given_bias or (None, None)
        return known if place.kwargs.get(BIAS) is given else None
    ragged = place.group_step.ragged
    known = table_of(programme.attends, ragged.max_kv, cache.bias_tables)
    if BIAS in (programme.others or ()):
        cache.given_bias = _numbers(programme, place, len(place.group_step.slots)), known
    return known


def _source_is_plain(programme: LayerProgramme, cache: CacheOverPages, place: LayerPlace) -> bool:
    """Return whether a layer adds zeros to the scores of an encoder's output."""
    given: Tensor | None = place.kwargs.get(SOURCE_BIAS)
    if given is None:  # the trace has seen that its code makes zeros
        cache.given_bias = _numbers(programme, place, 1), None
        return True
    return cache.given_bias is not None and cache.given_bias[0] is given and cache.given_bias[1] is None


def _numbers(programme: LayerProgramme, place: LayerPlace, keys: int) -> Tensor:
    """Return what layers hand on in place of a bias [1, H, N, keys], whose numbers nobody reads in a ragged pass."""
    tokens = len(place.group_step.slots)
    return torch.zeros(1, dtype=programme.dtype).expand(1, programme.biased_heads or 1, tokens, keys)


def _source_layer(programme: LayerProgramme, place: LayerPlace) -> SourceLayer | None:
    """Return the layer of the cache that has keys of the encoder's output, after it got those that this pass adds."""
    whole, source, states = place.whole, programme.source, place.kwargs.get(SOURCE_STATES)
    assert whole is not None and source is not None
    layer: SourceLayer = whole.cross_attention_cache.layers[source.layer_idx]
    if not whole.is_updated[source.layer_idx]:
        if type(states) is not Tensor or states.ndim != 3 or states.dtype is not programme.dtype:
            return None
        keys, values = (
            linear(states).view(1, -1, source.heads, dim).transpose(1, 2)
            for linear, dim in ((source.key, source.dim), (source.value, source.value_dim))
        )
        layer.keep(keys, values)
        whole.is_updated[source.layer_idx] = True
    return layer
