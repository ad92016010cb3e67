"""The spec of a quantized layer from its settings in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from ..config import WeightConfig
from ..errors import UnsupportedError
from ..keywords import one_of
from .backends.backend import LinearSpec
from .formats import KINDS, Format, Layout, check_group_size
from .formats.blocks import VERSION_SETTING

SETTINGS = ("bits", "format", "activations", "group_size", "symmetric", "minima", "scale_dtype", "ordered")
SCALE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def spec_of(settings: Mapping[str, Any], weight: Tensor) -> LinearSpec:
    """Return the spec of a layer's `Layout.module_settings`, where the model has a Linear with `weight` [out, in].

    Raises UnsupportedError for what no layer is.
    """
    unknown = sorted(settings.keys() - {*SETTINGS, VERSION_SETTING})
    if unknown or "bits" not in settings:
        what = f"{unknown[0]!r} is not known" if unknown else "bits is missing"
        raise UnsupportedError(f"{what}; a module has {', '.join(SETTINGS)}")
    one_of("format", settings.get("format", "int"), get_args(Format))
    rows, columns = weight.shape
    only = next((k.only for k in KINDS.values() if k.only is not None and k.format == settings.get("format")), None)
    if only is not None:
        return _spec_of_only(only, settings, weight, (rows, columns))
    own = {name: settings[name] for name in ("bits", "format", "activations", "symmetric") if name in settings}
    config = WeightConfig(**own)
    group_size, minima = settings.get("group_size"), settings.get("minima", False)
    if group_size is not None and (type(group_size) is not int or group_size < 1):
        raise UnsupportedError(f"group_size={group_size!r} must be a number of inputs")
    one_of("minima", minima, (True, False))
    one_of("ordered", settings.get("ordered", False), (True, False))
    scale_dtype = settings.get("scale_dtype")
    if scale_dtype is not None:
        one_of("scale_dtype", scale_dtype, tuple(SCALE_DTYPES))
    scales = SCALE_DTYPES[scale_dtype] if scale_dtype else None
    grouped = group_size or (128 if config.bits < 8 else None)
    if minima and (config.format == "fp8" or grouped is None):
        raise UnsupportedError("minima=True needs group_size=, and format='int'")
    if grouped is not None:
        check_group_size((rows, columns), grouped)
    layout = replace(config.layout, group_size=grouped, symmetric=config.symmetric and not minima, minima=minima)
    return LinearSpec(
        in_features=columns, out_features=rows, layout=replace(layout, scale_dtype=scales), dtype=weight.dtype,
        device_type=weight.device.type, activations=config.activations,
    )  # fmt: skip


def _spec_of_only(layout: Layout, settings: Mapping[str, Any], weight: Tensor, shape: tuple[int, int]) -> LinearSpec:
    """`spec_of` for a format of one layout."""
    said = {name: value for name, value in settings.items() if name != "activations"}
    if said != layout.settings:
        raise UnsupportedError(f"settings={said} must be {layout.settings}, as all {layout.label.upper()} weights are")
    one_of("activations", settings.get("activations", "auto"), ("auto", None, "int8"))
    check_group_size(shape, layout.group_size or shape[1])
    return LinearSpec(
        in_features=shape[1], out_features=shape[0], layout=layout, dtype=weight.dtype,
        device_type=weight.device.type, activations=settings.get("activations", "auto"),
    )  # fmt: skip
