"""compressed-tensors checkpoints, as llm-compressor writes them, with integer or FP8 weights.

Source of the layouts: the compressed-tensors package, `pack-quantized`, `int-quantized` and `float-quantized`. They
are our own (linear/formats.py), but for 8 bits in words and for scales of a whole tensor or of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..config import Activations
from ..errors import HfAccelError
from ..linear import Int4Weight, Int8Weight, QuantizedWeight
from ..linear.formats import BYTES, FLOAT8, Format, Layout, pack_zero_points, unpack_words
from .block_fp8 import by_output, checked_block, described
from .gptq import FLOATS, cut
from .reader import Description, Found, Parts, Reader, cut_group, group_of, order_of, refuse

NAME = "compressed-tensors"
FORMATS = {"int": ("pack-quantized", "int-quantized"), "float": ("float-quantized",)}  # by the type of the weights


class Group(NamedTuple):
    """A member of config_groups. block: the outputs and inputs that share a scale, None if there are no blocks."""

    targets: list[str]
    bits: int
    format: Format
    activations: Activations
    block: tuple[int, int] | None


class CompressedTensors(Reader):
    """Integers of 4 and 8 bits, packed in words or not, and FP8, with dynamic activations of 8 bits or without."""

    method = NAME
    suffixes: ClassVar[tuple[str, ...]] = (
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any]) -> None:
        for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
            if config.get(key):
                raise refuse(NAME, f"has {key}={config[key]!r}, which is not read")
        if config.get("quantization_status", "compressed") != "compressed":
            raise refuse(NAME, f"has quantization_status={config['quantization_status']!r}, not 'compressed'")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise refuse(NAME, f"has config_groups={groups!r}, which names no weights")
        self._groups = [_checked(config, group) for group in groups.values()]
        blocks = {group.block for group in self._groups if group.block is not None}
        if len(blocks) > 1:
            raise refuse(NAME, f"has blocks of several sizes, {sorted(blocks)}, of which one is read")
        self._block = next(iter(blocks), None)

    def is_part(self, suffix: str, found: Found) -> bool:
        return suffix in self.suffixes or (suffix == "weight" and found.dtype in (torch.int8, FLOAT8))

    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        name = stored.name
        outputs, inputs = shape
        scheme = self._scheme(name)
        bits = scheme.bits
        if "weight" in stored or scheme.format == "fp8":
            stored.expect("weight", (BYTES[scheme.format].stored_as,), shape)
            if scheme.block is not None:
                return described(stored, "weight_scale", scheme.block, shape)
            if "weight_g_idx" in stored:
                raise refuse(NAME, f"holds {name!r} in the order of its activations, which is read where it is packed")
        else:
            stored.expect("weight_packed", (torch.int32,), (outputs, -(-inputs * bits // 32)))
        if inputs * bits % 32 or ("weight" in stored and bits != 8):
            raise refuse(NAME, f"has {name!r} [{outputs}, {inputs}] in {bits} bits, which is no whole number of words")
        if "weight_shape" in stored:
            there = stored.expect("weight_shape", (torch.int64,), (2,)).read().tolist()
            if there != list(shape):
                raise HfAccelError(
                    f"'{name}.weight_shape' is {there} in the checkpoint, but the layer is {list(shape)}"
                )
        scales = stored.expect("weight_scale", FLOATS)
        groups = _columns(scales)
        if groups is not None:
            stored.expect("weight_scale", FLOATS, (outputs, groups or 1))
        group = group_of(name, inputs, groups or 1)
        has_zeros = "weight_zero_point" in stored
        if has_zeros and bits == 8:
            raise refuse(NAME, f"has {name!r} in 8 bits with zero points, which are read for 4 bits only")
        if has_zeros:
            stored.expect("weight_zero_point", (torch.int32,), (-(-outputs // 8), groups or 1))
        order = stored.order("weight_g_idx", inputs, group)
        assert isinstance(scales.dtype, torch.dtype)
        size = group if "weight" in stored else cut_group(group)
        layout = Layout(
            bits=bits, group_size=None if bits == 8 and group == inputs else size,
            symmetric=not has_zeros, ordered=order is not None, format=scheme.format,
        )  # fmt: skip
        return Description(layout, scales.dtype, scheme.activations)

    def convert(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        scale = _by_output(stored["weight_scale"], shape)
        group, by_output = shape[1] // scale.shape[1], scale.shape[1] == 1
        index = stored.get("weight_g_idx")
        order = None if index is None else order_of(name, index, shape[1], group)
        pieces = group // cut_group(group)
        words = stored["weight_packed"].contiguous()
        if words.shape[1] * 4 == shape[1]:
            integers = (words.view(torch.uint8) ^ 128).view(torch.int8)
            return Int8Weight(_ordered(integers, order), cut(scale, 1 if by_output else pieces), order)
        weight = Int4Weight(words, cut(scale, pieces), torch.tensor(shape, device=words.device), input_order=order)
        if order is not None:
            integers = _ordered(unpack_words(words), order)
            weight = replace(weight, weight_packed=Int4Weight.from_integers(integers, scale).weight_packed)
        zeros = stored.get("weight_zero_point")
        if zeros is not None and pieces > 1:
            zeros = pack_zero_points(cut(unpack_words(zeros.t().contiguous()).t()[: shape[0]], pieces).contiguous())
        return replace(weight, weight_zero_point=zeros)

    def loose(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        if "weight_packed" in parts:
            return None
        scale, block = parts["weight_scale"], self._block
        if block is not None and scale.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
            return {"weight_scale": by_output(scale, block, shape)}
        return {"weight_scale": _by_output(scale, shape)}

    def _scheme(self, name: str) -> Group:
        """How a Linear is stored, and what happens to its activations."""
        for group in self._groups:
            if any(_targets(target, name) for target in group.targets):
                return group
        raise refuse(NAME, f"holds {name!r} quantized, which no group of config_groups has among its targets")


def _checked(config: Mapping[str, Any], group: Mapping[str, Any]) -> Group:
    """Raises UnsupportedError for what is not read."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    form, kind, bits = group.get("format") or config.get("format"), weights.get("type"), weights.get("num_bits")
    if form not in FORMATS.get(str(kind), ()) or bits not in ((4, 8) if kind == "int" else (8,)):
        what = f"format={form!r} with weights of {bits} bits and type {kind!r}"
        known = "integers of 4 and 8 bits in pack-quantized and int-quantized, and floats of 8 in float-quantized"
        raise refuse(NAME, f"has {what}, of which {known} are read")
    strategies = ("group", "channel", "tensor") if kind == "int" else ("channel", "tensor", "block")
    if weights.get("strategy") not in strategies:
        names = " and ".join(", ".join(strategies).rsplit(", ", 1))
        raise refuse(NAME, f"has strategy={weights.get('strategy')!r}, of which {names} are read")
    if group.get("output_activations"):
        raise refuse(NAME, "quantizes the outputs of layers")
    if inputs and (inputs.get("num_bits") != 8 or inputs.get("type") != kind or not inputs.get("dynamic")):
        raise refuse(NAME, f"has input_activations={inputs!r}, of which dynamic ones of 8 bits are read")
    block = checked_block(NAME, weights.get("block_structure")) if weights["strategy"] == "block" else None
    # Activations go to FP8 where that is faster, as with a weight of our own.
    activations: Activations = "int8" if inputs and kind == "int" else "auto"
    targets = list(group.get("targets", ()))
    return Group(targets, int(weights["num_bits"]), "int" if kind == "int" else "fp8", activations, block)


def _targets(target: str, name: str) -> bool:
    """Whether a target means a Linear of this name: its class, a name or its end, or a regular expression."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name) or name.endswith(f".{target}")


def _columns(scale: Found | Tensor) -> int | None:
    """Groups of inputs that have a scale each; None: one scale for the whole tensor."""
    shape = tuple(scale.shape or ())
    return shape[1] if len(shape) == 2 and shape != (1, 1) else (None if shape in ((), (1,), (1, 1)) else 0)


def _by_output(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """[out, groups], also where the whole tensor has one scale."""
    return scale if _columns(scale) else scale.reshape(1, 1).expand(shape[0], 1).contiguous()


def _ordered(integers: Tensor, order: Tensor | None) -> Tensor:
    return integers if order is None else integers.index_select(1, order.to(integers.device))
