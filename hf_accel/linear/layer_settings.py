"""The spec of a quantized layer from its settings in config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from ..config import WeightConfig
from ..config.patch_config import Weights
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


def without_idle_groups(weights: Weights, modules: Mapping[str, Mapping[str, Any]]) -> Weights:
    """Return the weights of a saved config without a group_size that had no meaning.

    Earlier versions wrote "group_size": 128 for 8 bits too, whose scales belonged to outputs nevertheless.
    """
    if not isinstance(weights, Mapping) or weights.get("bits") != 8 or weights.get("group_size") != 128:
        return weights
    grouped = any(each.get("bits") == 8 and each.get("group_size") is not None for each in modules.values())
    idle = weights.get("format") == "fp8" or (modules and not grouped)
    return {name: value for name, value in weights.items() if name != "group_size"} if idle else weights


def parse_modules(modules: object) -> dict[str, dict[str, Any]]:
    if modules is None:
        return {}
    if not isinstance(modules, Mapping):
        raise UnsupportedError(f"modules={modules!r} must give the settings of each quantized module by its name")
    for name, settings in modules.items():
        if not (isinstance(name, str) and isinstance(settings, Mapping)):
            raise UnsupportedError(f"modules: {name!r} has the settings {settings!r}, which must be a dict")
    return {name: dict(settings) for name, settings in modules.items()}


def parse_tables(tables: object, modules: Collection[str]) -> dict[str, str]:
    found: dict[str, Any] = dict(tables) if isinstance(tables, Mapping) else {} if tables is None else {"": tables}
    for name, head in found.items():
        if not isinstance(name, str) or head not in modules:
            raise UnsupportedError(f"tables={tables!r} must give the quantized head of each embedding by its name")
    return found
