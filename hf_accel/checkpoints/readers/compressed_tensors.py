"""compressed-tensors checkpoints, as llm-compressor writes them, with integer, FP8 or NVFP4 weights.

Source of the layouts: the compressed-tensors package, `pack-quantized`, `int-quantized`, `float-quantized` and
`nvfp4-pack-quantized`. They are our own (linear/formats), except for 8 bits in words, 4 bits in bytes, and scales of a
whole tensor or of blocks.

A static scale of FP8 activations (`input_scale`) is checked and left out: activations are rounded with scales of their
own rows here, or not at all, which is nearer to the float model and never saturates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...config import Activations
from ...errors import HfAccelError
from ...linear import Int4Weight, Int8Weight, QuantizedWeight
from ...linear.formats import FLOAT8, NVFP4, Layout, kind_of, pack_zero_points, unpack_words
from .block_fp8 import by_output, checked_block, described
from .gptq import FLOAT_DTYPES, in_pieces
from .reader import (
    Description,
    ForeignReader,
    Found,
    Parts,
    contradiction,
    cut_group,
    dtype_of,
    group_of,
    order_of,
    refuse,
)

NAME = "compressed-tensors"
FORMATS: dict[tuple[object, object], tuple[str, ...]] = {  # by the type and the bits of the weights
    ("int", 4): ("pack-quantized", "int-quantized"), ("int", 8): ("pack-quantized", "int-quantized"),
    ("float", 8): ("float-quantized",), ("float", 4): ("nvfp4-pack-quantized",),
}  # fmt: skip
WHOLE = "weight_global_scale"  # of NVFP4


class Group(NamedTuple):
    """A member of config_groups.

    layout: as config.json says it, with the group size of the strategy "group". static: there is a
    scale for the activations. block: the outputs and inputs that share a scale, None if there are no blocks.
    """

    targets: list[str]
    layout: Layout
    activations: Activations
    strategy: str
    static: bool
    block: tuple[int, int] | None


class CompressedTensors(ForeignReader):
    """Integers of 4 and 8 bits, packed in words or not, and FP8, with activations of 8 bits or without; NVFP4A16."""

    method = NAME
    suffixes: ClassVar[tuple[str, ...]] = (
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale", WHOLE,
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
        self._in_bytes: set[str] = set()  # Linears of 4 bits whose numbers have a byte each
        if any(group.static for group in self._groups):
            self.note = "the checkpoint's static scales of activations are not used; rows get scales of their own"

    def is_part(self, suffix: str, found: Found) -> bool:
        return suffix in self.suffixes or (suffix == "weight" and found.dtype in (torch.int8, FLOAT8))

    def patterns(self) -> dict[str, str]:
        # Weights have the names of norms and embeddings: only those of Linears that are packed here are collected.
        leaves = {name.rpartition(".")[2] for name in self._in_bytes}
        return super().patterns() | {rf"(?<=\.{re.escape(leaf)})\.weight$": "weight" for leaf in sorted(leaves)}

    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        name = stored.name
        outputs, inputs = shape
        scheme = self._scheme(name)
        if scheme.layout.is_float4:
            return _described_nvfp4(stored, shape)
        bits, in_bytes = scheme.layout.bits, "weight" in stored or scheme.layout.format == "fp8"
        if scheme.static and "input_scale" not in stored:
            raise contradiction("input_activations with dynamic=false", f"there is no '{name}.input_scale'")
        if in_bytes:
            stored.expect("weight", (kind_of(replace(scheme.layout, bits=8)).stored_as,), shape)
            if scheme.block is not None:
                return described(stored, "weight_scale", scheme.block, shape)
            if "weight_g_idx" in stored:
                raise refuse(NAME, f"holds {name!r} in the order of its activations, which is read where it is packed")
        else:
            stored.expect("weight_packed", (torch.int32,), (outputs, -(-inputs * bits // 32)))
        if inputs * bits % 32:
            raise refuse(NAME, f"has {name!r} [{outputs}, {inputs}] in {bits} bits, which is no whole number of words")
        if in_bytes and bits == 4:
            _check_range(name, stored)
            self._in_bytes.add(name)
        if "weight_shape" in stored:
            there = stored.expect("weight_shape", (torch.int64,), (2,)).read().tolist()
            if there != list(shape):
                raise HfAccelError(
                    f"'{name}.weight_shape' is {there} in the checkpoint, but the layer is {list(shape)}"
                )
        scales, groups = _expect_scales(stored, scheme, shape)
        group = group_of(name, inputs, groups)
        has_zeros = self._expect_zeros(stored, scheme, outputs, groups)
        order = stored.order("weight_g_idx", inputs, group)
        if scheme.layout.ordered and "weight_g_idx" not in stored:
            raise contradiction("actorder='group'", f"there is no '{name}.weight_g_idx'")
        size = group if in_bytes and bits == 8 else cut_group(group)
        layout = replace(
            scheme.layout, group_size=None if bits == 8 and group == inputs else size,
            symmetric=not has_zeros, ordered=order is not None, scale_dtype=dtype_of(scales),
        )  # fmt: skip
        return Description(layout, scheme.activations)

    def convert(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        scale = _by_output(stored["weight_scale"], shape)
        group, by_output = shape[1] // scale.shape[1], scale.shape[1] == 1
        pieces = group // cut_group(group)
        zeros = stored.get("weight_zero_point")
        if name in self._in_bytes:
            zeros = None if zeros is None else in_pieces(zeros, pieces).contiguous()
            return Int4Weight.from_integers(stored["weight"], in_pieces(scale, pieces), zeros)
        index = stored.get("weight_g_idx")
        order = None if index is None else order_of(name, index, shape[1], group)
        words = stored["weight_packed"].contiguous()
        if words.shape[1] * 4 == shape[1]:
            integers = (words.view(torch.uint8) ^ 128).view(torch.int8)
            return Int8Weight(_ordered(integers, order), in_pieces(scale, 1 if by_output else pieces), order)
        weight = Int4Weight(
            words, in_pieces(scale, pieces), torch.tensor(shape, device=words.device), input_order=order
        )
        if order is not None:
            integers = _ordered(unpack_words(words), order)
            weight = replace(weight, weight_packed=Int4Weight.from_integers(integers, scale).weight_packed)
        if zeros is not None and pieces > 1:
            zeros = pack_zero_points(
                in_pieces(unpack_words(zeros.t().contiguous()).t()[: shape[0]], pieces).contiguous()
            )
        return replace(weight, weight_zero_point=zeros)

    def own_tensors(self, name: str, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        if WHOLE in parts:
            return dict(parts)
        if "weight_packed" in parts or name in self._in_bytes:
            return None
        scale, block = parts["weight_scale"], self._block
        own = {"weight": parts["weight"]} if "weight" in parts else {}
        if block is not None and scale.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
            return own | {"weight_scale": by_output(scale, block, shape)}
        return own | {"weight_scale": _by_output(scale, shape)}

    def _expect_zeros(self, stored: Parts, scheme: Group, outputs: int, groups: int) -> bool:
        """Return whether there are zero points, which then are right."""
        name = stored.name
        if "weight_zero_point" not in stored:
            if not scheme.layout.symmetric:
                raise contradiction("symmetric=false", f"there is no '{name}.weight_zero_point'")
            return False
        if scheme.layout.bits == 8:
            raise refuse(NAME, f"has {name!r} in 8 bits with zero points, which are read for 4 bits only")
        if name in self._in_bytes:
            _check_range(name, stored, "weight_zero_point")
            stored.expect("weight_zero_point", (torch.int8,), (outputs, groups))
        else:
            stored.expect("weight_zero_point", (torch.int32,), (-(-outputs // 8), groups))
        return True

    def _scheme(self, name: str) -> Group:
        """Return how a Linear is stored, and what happens to its activations."""
        for group in self._groups:
            if any(_targets(target, name) for target in group.targets):
                return group
        raise refuse(NAME, f"holds {name!r} quantized, which no group of config_groups has among its targets")


def _checked(config: Mapping[str, Any], group: Mapping[str, Any]) -> Group:
    """Raises UnsupportedError for what is not read."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or None
    form, kind, bits = group.get("format") or config.get("format"), weights.get("type"), weights.get("num_bits")
    if form not in FORMATS.get((kind, bits), ()):
        what = f"format={form!r} with weights of {bits} bits and type {kind!r}"
        known = (
            "integers of 4 and 8 bits in pack-quantized and int-quantized, and floats of 8 in float-quantized and "
            "of 4 in nvfp4-pack-quantized"
        )
        raise refuse(NAME, f"has {what}, of which {known} are read")
    if (kind, bits) == ("float", 4):
        return _checked_nvfp4(group, weights)
    strategies = ("group", "channel", "tensor") if kind == "int" else ("channel", "tensor", "block")
    if weights.get("strategy") not in strategies:
        names = " and ".join(", ".join(strategies).rsplit(", ", 1))
        raise refuse(NAME, f"has strategy={weights.get('strategy')!r}, of which {names} are read")
    if group.get("output_activations"):
        raise refuse(NAME, "quantizes the outputs of layers")
    static = inputs is not None and not inputs.get("dynamic")
    if inputs and (inputs.get("num_bits") != 8 or inputs.get("type") != kind or (static and kind == "int")):
        known = "ones of 8 bits and of the weights' type, dynamic or of FP8,"
        raise refuse(NAME, f"has input_activations={inputs!r}, of which {known} are read")
    # Activations go to FP8 where that is faster, as with a weight of our own.
    activations: Activations = "int8" if inputs and kind == "int" else "auto"
    layout = Layout(
        bits=int(weights["num_bits"]), format="int" if kind == "int" else "fp8", group_size=weights.get("group_size"),
        symmetric=weights.get("symmetric", True) is not False, ordered=weights.get("actorder") in ("group", "dynamic"),
    )  # fmt: skip
    return Group(
        targets=list(group.get("targets", ())), layout=layout, activations=activations,
        strategy=weights["strategy"], static=static,
        block=checked_block(NAME, weights.get("block_structure")) if weights["strategy"] == "block" else None,
    )  # fmt: skip


def _checked_nvfp4(group: Mapping[str, Any], weights: Mapping[str, Any]) -> Group:
    """Check a group whose weights are floats of 4 bits. Raises UnsupportedError for what is not read."""
    for setting, known in (("strategy", "tensor_group"), ("group_size", NVFP4.group_size), ("symmetric", True)):
        if weights.get(setting, True) != known:
            raise refuse(NAME, f"has {setting}={weights.get(setting)!r} in {FORMATS['float', 4][0]}, not {known!r}")
    for rounded in ("input_activations", "output_activations"):
        if group.get(rounded):
            bits = group[rounded].get("num_bits")
            raise refuse(NAME, f"has {rounded} of {bits} bits with NVFP4 weights, which are read without (NVFP4A16)")
    return Group(list(group.get("targets", ())), NVFP4, "auto", "tensor_group", static=False, block=None)


def _described_nvfp4(stored: Parts, shape: tuple[int, int]) -> Description:
    size = NVFP4.group_size or 0
    if shape[1] % size:
        raise refuse(NAME, f"has {stored.name!r} with {shape[1]} inputs, which are no whole groups of {size}")
    stored.expect("weight_packed", (torch.uint8,), (shape[0], shape[1] // 2))
    stored.expect("weight_scale", (FLOAT8,), (shape[0], shape[1] // size))
    whole = float(stored.expect(WHOLE, (torch.float32,), (1,)).read())
    if not 0 < whole < math.inf:
        raise HfAccelError(f"'{stored.name}.{WHOLE}' is {whole} in the checkpoint, by which scales cannot be divided")
    return Description(NVFP4)


def _expect_scales(stored: Parts, scheme: Group, shape: tuple[int, int]) -> tuple[Found, int]:
    """The scales of a weight [out, in], and how many groups of inputs have one."""
    outputs, inputs = shape
    if scheme.strategy == "tensor":
        scales = stored.expect("weight_scale", FLOAT_DTYPES)
        if scales.shape not in ((), (1,), (1, 1)):
            raise contradiction("strategy='tensor'", f"'{stored.name}.weight_scale' is {list(scales.shape or ())}")
        return scales, 1
    size = inputs if scheme.strategy == "channel" else scheme.layout.group_size
    if type(size) is not int or size < 1 or inputs % size:
        raise contradiction(f"group_size={size!r}", f"{stored.name!r} has {inputs} inputs")
    return stored.expect("weight_scale", FLOAT_DTYPES, (outputs, inputs // size)), inputs // size


def _check_range(name: str, stored: Parts, suffix: str = "weight") -> None:
    """Raise HfAccelError unless integers that have a byte each are numbers of 4 bits."""
    least, most = stored.expect(suffix, (torch.int8,)).read().aminmax()
    if least < -8 or most > 7:
        raise contradiction("num_bits=4", f"'{name}.{suffix}' holds numbers from {int(least)} to {int(most)}")


def _targets(target: str, name: str) -> bool:
    """Return whether a target means a Linear of this name: its class, a name or its end, or a regular expression."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name) or name.endswith(f".{target}")


def _by_output(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """[out, groups], also where the whole tensor has one scale."""
    by_output = scale.dim() == 2 and len(scale) == shape[0]
    return scale if by_output else scale.reshape(1, 1).expand(shape[0], 1).contiguous()


def _ordered(integers: Tensor, order: Tensor | None) -> Tensor:
    return integers if order is None else integers.index_select(1, order.to(integers.device))
