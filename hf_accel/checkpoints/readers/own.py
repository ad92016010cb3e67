"""Our own checkpoints: config.json lists the quantized layers, and the files have their tensors as they are here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import HfAccelError, UnsupportedError
from ...linear import LinearSpec, QuantModule
from ...linear.formats import KINDS, Layout, state, zeros
from ...linear.formats.blocks import UNIT_INPUTS, VERSION, VERSION_SETTING, Blocks, tensors_of
from ...linear.hf import METHOD
from ...linear.layer_settings import spec_of
from ..contents import AGAIN, check_finite, check_tensor, missing
from .reader import Described, Found, Parts, Reader, are_safe, headers_of


class Own(Reader):
    """Checkpoints that save_pretrained wrote of a model with quantized layers, which are loaded unchanged."""

    method = METHOD
    suffixes: ClassVar[tuple[str, ...]] = tuple(
        {f.name: 1 for kind in (*KINDS.values(), Blocks) for f in fields(kind)}
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.listed: Mapping[str, Mapping[str, Any]] = config["modules"]
        self._specs: dict[tuple[Any, ...], LinearSpec] = {}  # by the settings and the weight, which most layers share

    def headers(self, model: PreTrainedModel, files: Sequence[str]) -> Iterable[tuple[str, Found]] | None:
        return headers_of([Path(file) for file in files], way_out=f", or {AGAIN}") if are_safe(files) else None

    def spec(self, stored: Parts, weight: Tensor) -> tuple[LinearSpec, bool]:
        settings = self.listed[stored.name]
        try:
            self.holds_blocks(stored.name)
            key = (repr(settings), weight.shape, weight.dtype, weight.device)
            if key not in self._specs:
                self._specs[key] = spec_of(settings, weight)
            return self._specs[key], settings.get("ordered", False)
        except UnsupportedError as error:
            what = f"quantization_config in config.json, module {stored.name!r}: {error}"
            raise UnsupportedError(f"{what}; {AGAIN}") from error

    def holds_blocks(self, name: str) -> bool:
        """Return whether a module is in blocks. Raises UnsupportedError for blocks that are not known."""
        version = self.listed[name].get(VERSION_SETTING)
        if version is not None and (version != VERSION or self.listed[name].get("bits") not in (*UNIT_INPUTS,)):
            raise UnsupportedError(
                f"{VERSION_SETTING}={version!r} is not known here, where blocks are of version {VERSION}"
            )
        return version is not None

    @staticmethod
    def check(model: PreTrainedModel, layer: QuantModule, stored: Parts) -> None:
        """Raise HfAccelError unless `stored` are the tensors of the layer, which was made by its settings."""
        name, shape = stored.name, (layer.out_features, layer.in_features)
        experts = None if layer.layout_of_blocks is None else layer.experts
        described, expected = _tensors_in(layer.layout, shape, layer.dtype, experts)
        for suffix, tensor in expected.items():
            if suffix not in stored:
                raise missing(model, f"{name}.{suffix}", described)
            check_tensor(f"{name}.{suffix}", tensor, stored.tensors[suffix], described)
        for suffix in sorted(stored.tensors.keys() - expected.keys()):
            holds = f"{f'{name}.{suffix}'!r}, which a layer with {described}, as in config.json, has not"
            raise HfAccelError(f"the checkpoint holds {holds}; {AGAIN}")
        there = _numbers(stored, "weight_shape")
        if there is not None and there.tolist() != list(shape):
            is_there = f"'{name}.weight_shape' is {there.tolist()} in the checkpoint"
            raise HfAccelError(f"{is_there}, but the layer is {list(shape)}; {AGAIN}")
        order = _numbers(stored, "input_order")
        if order is not None and not torch.equal(order.sort().values, torch.arange(shape[1]).to(order)):
            raise HfAccelError(f"'{name}.input_order' does not name each of {shape[1]} inputs once; {AGAIN}")


@lru_cache(maxsize=1024)
def _tensors_in(
    layout: Layout, shape: tuple[int, int], dtype: torch.dtype, experts: int | None
) -> tuple[str, dict[str, Described]]:
    """Return the text for errors and the tensors of a weight [out, in] in a layout; most layers have an equal one.

    dtype: of the scales where the layout does not say it. experts: whose blocks follow each other, 1 for a Linear;
    None for the stored form.
    """
    if experts is None:
        tensors = state(zeros(layout, shape, dtype=torch.float32, device="meta"))
    else:
        each = (shape[0] // experts, shape[1])
        tensors = tensors_of(Blocks.empty(layout, each, experts=experts, dtype=dtype, device="meta"))
    return str(layout), {name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _numbers(stored: Parts, suffix: str) -> Tensor | None:
    """Return a tensor of a layer if it is there and has numbers."""
    found = stored.tensors[suffix].read() if suffix in stored else None
    return None if found is None or found.device.type == "meta" else found


def check_loaded(model: PreTrainedModel) -> None:
    """Check the quantized layers of a model that was just loaded, also from files whose headers nobody has read.

    Raises HfAccelError as the preparer does.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantModule):
            continue
        loaded = {
            suffix: Found(tensor.dtype, tuple(tensor.shape), tensor.detach)
            for suffix, tensor in (layer._buffers | layer._parameters).items()
            if tensor is not None and getattr(tensor, "_is_hf_initialized", False)  # transformers' mark: was read
        }
        bias = loaded.pop("bias", None)
        if layer.bias is not None and bias is None:
            raise missing(model, f"{name}.bias")
        stored = Parts(name, loaded)
        Own.check(model, layer, stored)
        check_parts(stored)


def check_parts(stored: Parts) -> None:
    """Raise HfAccelError for NaN and infinity in scales and minima; negative scales are known of other programs."""
    for suffix, found in stored.tensors.items():
        if isinstance(found.dtype, torch.dtype) and found.dtype.is_floating_point and found.dtype.itemsize > 1:
            check_finite(f"{stored.name}.{suffix}", found.read())


def check_numbers(name: str, layer: QuantModule) -> None:
    """Raise HfAccelError if the weight of a layer that was loaded, and is not packed yet, holds what is no number.

    It reads the whole weight, and so comes when the file is read anyway.
    """
    if layer.layout_of_blocks is not None:
        return  # blocks are of integers
    weight = layer.quantized
    wrong = None if weight.weight_scale.device.type == "meta" else weight.not_a_number()
    if wrong is not None:
        raise HfAccelError(f"'{name}.{wrong[0]}' holds NaN at {wrong[1]} in the checkpoint; {AGAIN}")
