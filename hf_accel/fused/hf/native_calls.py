"""Decoder layers on the CPU that run by their trace: each is one native call for a pass of few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.cpu import CpuBackend
from ...attention.hf.bias import table_of
from ...cache.hf.encoder_decoder import tokens_part
from ...cache.hf.layers import CacheOverPages, LayerOverPages
from ...cache.hf.ragged import RaggedCache, SourceLayer
from ...kernels.cpu.attention import position_bias_fields
from ...kernels.cpu.layer_call import Parts, pack_parts
from ...kernels.cpu.library import native
from ...kernels.layouts import PositionBias
from ...recognition.call_form import BIAS, CACHE, OF_LAYER, POSITION_IDS, SOURCE_BIAS, SOURCE_STATES
from ...recognition.of_positions import behind_tables
from ...recognition.operation import UntraceableError
from ...recognition.trace import Trace
from ..layer_programme import LayerProgramme, of_pages, of_rows, of_source, of_states, of_step
from ..traced_layer import Attention
from .layer_attention import as_called, attend_of, attention_of, planned_of, planned_source, source_attention
from .layer_calls import LayerCalls, cache_of
from .running_pass import LayerPlace

# Gives an input of a call on x [B, T, hidden]; None if it is not known, and the layer's own code must run.
Gives = Callable[[LayerProgramme, Tensor, LayerOverPages, LayerPlace], Parts | None]


class LayerInput(NamedTuple):
    """An input of native calls of decoder layers. is_read: whether those of a programme have it."""

    is_read: Callable[[LayerProgramme], bool]
    gives: Gives


class NativeCalls(LayerCalls[LayerProgramme]):
    """The LayerCalls of a layer on the CPU: one native call for a pass of few tokens."""

    computes = staticmethod(native)
    _inputs: tuple[Gives, ...] = ()  # of the calls of the programme that was made last

    def __reduce__(self) -> Any:
        return NativeCalls, ()

    def make(self, trace: Trace, layer: nn.Module, *, x: Tensor, table_dtype: torch.dtype | None) -> LayerProgramme:
        programme = self._make_programme(trace, layer, table_dtype)
        self._inputs = tuple(each.gives for each in LAYER_INPUTS if each.is_read(programme))
        return programme

    @staticmethod
    def _make_programme(trace: Trace, layer: nn.Module, table_dtype: torch.dtype | None) -> LayerProgramme:
        if all(operation.kind != "attend" for operation in trace.operations):
            return LayerProgramme(trace, table_dtype, Attention(0.0))
        planned = planned_of(trace, layer)
        attends = attend_of(trace)[0]
        spec = replace(planned.spec, dtype=trace.dtype)
        if not trace.tried:
            spec = replace(spec, bias=attends.values["biased"])
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
            held[name].given_bias[0] if name in held else cache if name == CACHE else None for name in programme.others
        )

    def compute(self, programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Tensor | None:
        inputs: Parts = {}
        for each in self._inputs:
            found = each(programme, x, pages, place)
            if found is None:
                return None
            inputs |= found
        return programme(x, inputs, adapters=place.adapters)


def _given(programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Parts | None:
    """Give what is the layer's own for each token, [B, T, size]."""
    assert programme.of_layer is not None
    given = place.kwargs.get(OF_LAYER)
    if type(given) is not Tensor or given.dtype is not programme.dtype or given.device != x.device:
        return None
    if given.shape != (*x.shape[:2], programme.of_layer.stride):
        return None
    place.held["given"] = given = given.contiguous()
    return pack_parts(given=(given.data_ptr(),))


def _rows(programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Parts | None:
    """Give the number of tokens, with cos and sin, and the factors of queries by their positions behind these."""
    known, numbers, own = place.held.get("tables"), programme.by_position, programme.own_tables
    if known is None or own is not None or numbers not in (None, known[1]):
        tables = place.tables
        if own is not None:
            positions = _given_positions(x, place)
            if positions is None:
                return None
            tables = own.of(positions)
        if numbers is not None:
            positions = _positions(programme, x, pages.cache, place)
            if positions is None or tables is None:
                return None
            tables = behind_tables(tables, numbers.of(positions).reshape(positions.shape))
        if tables is not None and (tables[0].stride(-1) != 1 or tables[1].stride() != tables[0].stride()):
            tables = tables[0].contiguous(), tables[1].contiguous()
        known = place.held["tables"] = of_rows(x, tables), numbers, tables
    return known[0]


def _pages(programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Parts | None:
    """Give the pages to which keys and values are written, or those of the layer that has left them."""
    if programme.taken is None:
        storage = pages.group.storage(programme.layer_idx, *programme.written)
    elif programme.layer_idx in pages.group.storages:
        storage = pages.group.storages[programme.layer_idx]
    else:
        return None
    if not programme.fits(storage):
        return None
    step = place.held.get("step")
    if step is None:
        step = place.held["step"] = of_step(place.group_step, storage.block_size)
    return of_pages(storage.pages) | step


def _positions(programme: LayerProgramme, x: Tensor, cache: CacheOverPages, place: LayerPlace) -> Tensor | None:
    """Return the positions of the tokens of x [B, T, hidden], [B or 1, T]; None if they are not known."""
    assert programme.by_position is not None
    if programme.by_position.counted:
        if isinstance(cache, RaggedCache):
            found: Any = cache.positions[None]
        else:
            found = torch.arange(x.shape[1])[None] + cache.get_seq_length(programme.layer_idx)
        return found
    return _given_positions(x, place)


def _given_positions(x: Tensor, place: LayerPlace) -> Tensor | None:
    """Return the positions that a layer is given for the tokens of x [B, T, hidden], [B or 1, T]; None if there are
    none that are known.
    """
    found = place.kwargs.get(POSITION_IDS)
    known = type(found) is Tensor and found.ndim == 2 and found.shape[1] == x.shape[1] and len(found) in (1, len(x))
    return found if known else None


def _states(programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Parts | None:
    layer, sizes = pages.cache.state_layer(programme.layer_idx), programme.state_sizes
    assert sizes is not None
    return of_states(layer.state_storage(x, sizes).pages, place.step.groups[layer.group_index].own)


def _score_bias(programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Parts | None:
    known = _position_bias(programme, pages.cache, place)
    if known is None:
        return None
    longest = place.group_step.ragged.max_kv
    return pack_parts(score_bias=position_bias_fields(known, programme.biased_heads, longest))


def _source(programme: LayerProgramme, x: Tensor, pages: LayerOverPages, place: LayerPlace) -> Parts | None:
    """Give the pages with keys of an encoder's output."""
    assert place.whole is not None
    if programme.is_source_biased and not _source_is_plain(programme, place.whole.cross_attention_cache, place):
        return None
    layer, own = _source_layer(programme, place), pages.group.storages[programme.layer_idx]
    held = None if layer is None else layer.group.storages.get(layer.layer_idx)
    if layer is None or held is None or not programme.fits_source(own, held):
        return None
    return of_source(held.pages, place.step.groups[layer.group_index], held.block_size)


def _position_bias(programme: LayerProgramme, cache: CacheOverPages, place: LayerPlace) -> PositionBias | None:
    """Return what a layer adds to the scores of its tokens, see attention/hf/bias.py; None for what is not known."""
    if programme.own_bias is None:
        if isinstance(cache, RaggedCache) and cache.bias is not None:
            return cache.bias  # which the model made for all layers that attend by operators
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


LAYER_INPUTS = (
    LayerInput(lambda programme: programme.of_layer is not None, _given),
    LayerInput(lambda programme: True, _rows),
    LayerInput(lambda programme: bool(programme.written) or programme.taken is not None, _pages),
    LayerInput(lambda programme: programme.state_sizes is not None, _states),
    LayerInput(lambda programme: programme.biased_heads > 0, _score_bias),
    LayerInput(lambda programme: programme.source is not None, _source),  # last: it computes keys
)
