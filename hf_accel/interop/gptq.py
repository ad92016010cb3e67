"""GPTQ checkpoints, as AutoGPTQ, optimum and GPTQModel write them.

Source of the layout: AutoGPTQ's QuantLinear.pack. `qweight` int32 [in * bits / 32, out] packs the levels of
consecutive inputs, the first in the lowest bits; `qzeros` int32 [groups, out * bits / 32] packs zero points in the
same way along the outputs, less 1 in the first version of the format; `scales` [groups, out]; `g_idx` int32 [in] is
the group of each input. The weight is (level - zero point) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..linear import Int4Weight, Int8Weight, QuantizedWeight
from ..linear.formats import Layout, pack_zero_points, unpack_words
from .reader import Description, Parts, Reader, cut_group, group_of, order_of, refuse

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Gptq(Reader):
    """Weights of 4 and 8 bits, with and without zero points and an order of the inputs (act-order)."""

    method = "gptq"
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits, version = config.get("bits"), config.get("checkpoint_format", "gptq")
        if bits not in (4, 8):
            raise refuse("GPTQ", f"has weights of {bits} bits, of which 4 and 8 are read")
        if version not in ("gptq", "gptq_v2"):
            raise refuse("GPTQ", f"has checkpoint_format={version!r}, of which 'gptq' and 'gptq_v2' are read")
        self.bits, self.less = int(bits), 1 if version == "gptq" else 0

    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        name = stored.name
        outputs, inputs = shape
        per_word = 32 // self.bits
        if inputs % per_word or outputs % per_word:
            raise refuse("GPTQ", f"has {name!r} [{outputs}, {inputs}], which is no whole number of 32-bit words")
        stored.expect("qweight", (torch.int32,), (inputs // per_word, outputs))
        scales = stored.expect("scales", FLOATS)
        groups = scales.shape[0] if scales.shape else 0
        stored.expect("scales", FLOATS, (groups, outputs))
        group = group_of(name, inputs, groups)
        zeros = self._zeros(stored.expect("qzeros", (torch.int32,), (groups, outputs // per_word)).read())
        order = stored.order("g_idx", inputs, group)
        middle = 2 ** (self.bits - 1)
        symmetric = bool((zeros == middle).all())
        if self.bits == 8 and not symmetric:
            raise refuse("GPTQ", f"has {name!r} in 8 bits with zero points, which are read for 4 bits only")
        layout = Layout(
            bits=self.bits, group_size=None if self.bits == 8 and groups == 1 else cut_group(group),
            symmetric=symmetric, minima=int(zeros.max()) > 15 and self.bits == 4, ordered=order is not None,
        )  # fmt: skip
        scale_dtype = scales.dtype
        assert isinstance(scale_dtype, torch.dtype)
        return Description(layout, torch.float32 if layout.minima else scale_dtype)

    def convert(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        inputs = shape[1]
        scale, words = stored["scales"].t().contiguous(), stored["qweight"].t().contiguous()  # of each output
        group = inputs // scale.shape[1]
        order = order_of(name, stored["g_idx"], inputs, group) if "g_idx" in stored else None
        order = None if order is None else order.to(words.device)
        pieces = group // cut_group(group)
        if self.bits == 8:
            integers = (words.view(torch.uint8) ^ 128).view(torch.int8)
            integers = integers if order is None else integers.index_select(1, order)
            return Int8Weight(integers, cut(scale, 1 if scale.shape[1] == 1 else pieces), order)
        zeros = self._zeros(stored["qzeros"]).t().contiguous()  # [out, groups]
        weight = Int4Weight(words, cut(scale, pieces), torch.tensor(shape, device=words.device), input_order=order)
        if order is not None:
            integers = unpack_words(words).index_select(1, order)
            weight = replace(weight, weight_packed=Int4Weight.from_integers(integers, scale).weight_packed)
        if (zeros == 8).all():
            return weight
        if zeros.max() > 15:  # which 4 bits do not hold: the zero point in the scale's unit then
            minimum = cut(zeros.float() * scale.float(), pieces)
            return replace(weight, weight_scale=weight.weight_scale.float(), weight_minimum=minimum)
        return replace(weight, weight_zero_point=pack_zero_points(cut(zeros - 8, pieces).to(torch.int8)))

    def _zeros(self, words: Tensor) -> Tensor:
        """int32 [groups, out / 8] -> int16 [groups, out], from 0 to 16."""
        levels = (unpack_words(words) + 8).short() if self.bits == 4 else words.contiguous().view(torch.uint8).short()
        return levels + self.less


def cut(values: Tensor, pieces: int) -> Tensor:
    """[out, groups] for groups cut into so many pieces."""
    return values if pieces == 1 else values.repeat_interleave(pieces, dim=1)
