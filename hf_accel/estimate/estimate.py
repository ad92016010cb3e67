"""estimate(): what a model needs, compared with what a machine has."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, get_args

import torch
from torch import nn

from ..cache.quantized import QUANTIZED
from ..config import KVDtype, WeightConfig, parse_weights
from ..errors import UnsupportedError
from ..keywords import Default, checked_keywords, one_of, positive_int, positive_number
from ..linear import LinearSpec
from ..models import model_of
from .layer_bytes import attention_layers, encoder_decoder_layers, encoder_layers
from .lengths import TEXT, decoder_positions, longest_input, source_length
from .result import Bound, Counted, Estimate
from .roofline import Machine
from .shapes import (
    DECODER_TOKENS,
    decoder_config,
    has_both,
    held_specs,
    is_encoder,
    load_config,
    patched_settings,
    shapes_of,
    stored_specs,
)
from .this_machine import measure_machine
from .workload import Workload, weight_tensors

AS_PATCHED: Any = Default("as patched")


@checked_keywords()
def estimate(
    model: Any,
    *,
    context: int | None = None,
    batch: int = 1,
    weights: Any = AS_PATCHED,
    kv_dtype: str | None = AS_PATCHED,
    dtype: torch.dtype | None = None,
    bandwidth: float | None = None,
    compute: float | None = None,
    compute_fp8: float | None = None,
    price_per_hour: float | None = None,
    device: torch.device | str = "cpu",
) -> Estimate:
    """Return bytes, seconds and cost of a decoder, an encoder or both, from its shapes alone: no weight is loaded.

    model: a config, a path or name of one, a model, or what holds one, as patch() takes it; a patched model counts as
        what it was before.
    context: tokens of each sequence; batch: sequences. None: 4,096 of a decoder, and of an encoder the longest input
        that it is made for: its positions, the patches of an image, 30 seconds of sound. With an encoder and a decoder
        these are the tokens of the answer, and as many of the text that it is made from; None: all positions.
    weights: as in `patch`; left out, the formats that the layers of a patched or quantized model have, or of a
        checkpoint that is quantized already, else None, as they are. Linears and experts that patch() knows take the
        bits and scales asked for, the head 8; embeddings stay.
    kv_dtype: None or "auto" for the model's dtype, "int8" or "fp8" for a byte per number and a scale per token, head,
        "int4" for half a byte, "int8-int4" for keys and values of each; left out, that of a patched model's cache,
        else None.
    dtype: of a model built from a config; None takes the config's, else float32.
    bandwidth, compute: bytes and operations per second of the machine. With neither, both are measured on `device`, on
        a CPU by the products that patch() would run, in a second or two; with one, TYPICAL_BALANCE gives the other.
    compute_fp8: operations per second on FP8 inputs, which weights="fp8" has in calls of many rows; None: measured on
        a GPU that has them if the others are, else as fast as compute.
    price_per_hour: of the machine, in any currency.

    Raises UnsupportedError for models of other layers, for a path without a config, and for values out of range.
    """
    if context is not None:
        positive_int("context", context)
    positive_int("batch", batch)
    model = model_of(model)
    patched = patched_settings(model) if isinstance(model, nn.Module) else (None, None)
    as_held = isinstance(weights, Default)
    weights = patched[0] if isinstance(weights, Default) else weights
    kv_dtype = patched[1] if isinstance(kv_dtype, Default) else kv_dtype
    one_of("kv_dtype", kv_dtype, (None, *get_args(KVDtype)))
    speeds = {"bandwidth": bandwidth, "compute": compute, "compute_fp8": compute_fp8}
    for name, value in {**speeds, "price_per_hour": price_per_hour}.items():
        positive_number(name, value)
    recipe = parse_weights(weights)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype={dtype!r} must be a dtype of torch, as torch.bfloat16")

    source = load_config(model) if isinstance(model, str | os.PathLike) else model
    shapes = shapes_of(source, dtype=dtype)
    held: dict[str, LinearSpec] = {}
    tables: frozenset[str] = frozenset()
    if as_held:
        is_model = isinstance(source, nn.Module)
        held, tables = (held_specs(source), tables) if is_model else stored_specs(source, shapes)
    workload = count(
        shapes, recipe, context=context, kv_dtype=None if kv_dtype == "auto" else kv_dtype, held=held,
        tables=tables,
    )  # fmt: skip
    workload = workload.at(context=workload.context, batch=batch)
    # One number alone may be another machine's: it is not mixed with what is measured here.
    is_given = bandwidth is not None or compute is not None
    machine = Machine.given(**speeds) if is_given else measure_machine(workload, device)
    return _evaluate(workload, machine, name=type(shapes).__name__, price_per_hour=price_per_hour)


def count(
    shapes: Any,
    recipe: WeightConfig | None,
    *,
    context: int | None,
    kv_dtype: str | None = None,
    held: Mapping[str, LinearSpec] | None = None,
    tables: Collection[str] = (),
) -> Workload:
    """Count one sequence of a model whose shapes are known. recipe, context, kv_dtype: as for `estimate`; no "auto".

    held: the specs of layers that are quantized already, by name. tables: embeddings that look rows up in a head.
    """
    config = decoder_config(shapes)
    encodes, has_source = is_encoder(config, shapes), has_both(shapes.config, shapes)
    if context is None:
        most = (decoder_positions(config) or TEXT) if has_source else DECODER_TOKENS
        context = longest_input(config, shapes) if encodes else min(most, DECODER_TOKENS)
    if has_source:
        source = source_length(shapes)
        layers = tuple(encoder_decoder_layers(shapes.config, context=context, source=source))
    else:
        layers = tuple((encoder_layers if encodes else attention_layers)(config, context=context))
    for refusal in filter(None, (layer.dtype_refusal(QUANTIZED.get(kv_dtype or "")) for layer in layers)):
        raise UnsupportedError(f"kv_dtype={kv_dtype!r} was asked for, but {refusal}")
    return Workload(
        tensors=tuple(weight_tensors(shapes, recipe, held, tables)),
        layers=layers,
        weights=_label(recipe, held or {}),
        dtype=shapes.dtype,
        kv_dtype=kv_dtype,
        context=context,
        batch=1,
    )


def _evaluate(workload: Workload, machine: Machine, *, name: str, price_per_hour: float | None) -> Estimate:
    weights_by_kind = workload.weights_by_kind
    seconds = machine.seconds(workload.decode) if workload.decodes else None
    prefill = machine.seconds(workload.prefill)
    each = None if seconds is None else 1e6 * seconds / workload.batch
    prompts = workload.batch * workload.context
    return Estimate(
        model=name,
        dtype=str(workload.dtype).removeprefix("torch."),
        weights=workload.weights,
        kv_dtype=workload.kv_dtype,
        context=workload.context,
        batch=workload.batch,
        parameters=sum(tensor.numel for tensor in workload.tensors),
        weights_bytes=sum(weights_by_kind.values()),
        weights_by_kind=weights_by_kind,
        kv_bytes=workload.kv_bytes,
        attention_bytes=workload.attention_bytes,
        activation_bytes=workload.activation_bytes,
        total_bytes=workload.total_bytes,
        read_bytes=round((workload.decode if workload.decodes else workload.prefill).nbytes),
        bandwidth=machine.bandwidth,
        compute=machine.compute,
        seconds_per_token=seconds,
        bound=Bound(
            prefill=machine.bound(workload.prefill),
            decode=machine.bound(workload.decode) if workload.decodes else None,
        ),
        prefill_seconds=prefill,
        price_per_hour=price_per_hour,
        cost_per_million_tokens=each and price_per_hour and price_per_hour / 3600 * each,
        cost_per_million_input_tokens=price_per_hour and 1e6 * price_per_hour / 3600 * prefill / prompts,
        counted=Counted(workload, machine),
    )


def _label(recipe: WeightConfig | None, held: Mapping[str, LinearSpec]) -> str | None:
    """Return the name of the weights' format: of layers that a model has, that of most numbers."""
    numbers: Counter[str] = Counter()
    for spec in held.values():
        numbers[spec.layout.label] += spec.in_features * spec.out_features
    main = max(numbers, key=numbers.__getitem__, default=None)
    return recipe.label if recipe and main in (None, recipe.layout.label) else main
