"""GPTQ checkpoints, as AutoGPTQ, optimum and GPTQModel write them.

Source of the layout: AutoGPTQ's QuantLinear.pack. `qweight` int32 [in * bits / 32, out] packs the levels of
consecutive inputs, the first in the lowest bits; `qzeros` int32 [groups, out * bits / 32] packs zero points in the
same way along the outputs, less 1 in the first version of the format; `scales` [groups, out]; `g_idx` int32 [in] is
the group of each input. The weight is (level - zero point) * scale.

Less 1, a zero point of 0 leaves its bits, and the two writers took that differently. AutoGPTQ's reader adds 1 to each
and keeps the bits that there are, so that 15 means 0. GPTQModel subtracts 1 from all zero points of a word by a
subtraction of words, where a zero borrows from its neighbour, and adds it again in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import HfAccelError
from ...linear import Int4Weight, Int8Weight, QuantizedWeight
from ...linear.formats import Layout, pack_zero_points, unpack_words
from .reader import Description, ForeignReader, Parts, contradiction, cut_group, dtype_of, group_of, order_of, refuse

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
AUTO_GPTQ, GPTQ_MODEL = "auto_gptq", "gptqmodel"
ONES = 0x11111111  # 1 in each of the eight zero points of a word


class Gptq(ForeignReader):
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
        self.symmetric, self.ordered = config.get("sym") is True, config.get("desc_act") is True
        self.group = None if config.get("dynamic") else config.get("group_size")  # "dynamic": some layers have others
        self.writers = _writers(config)

    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        name = stored.name
        outputs, inputs = shape
        per_word = 32 // self.bits
        if inputs % per_word or outputs % per_word:
            raise refuse("GPTQ", f"has {name!r} [{outputs}, {inputs}], which is no whole number of 32-bit words")
        stored.expect("qweight", (torch.int32,), (inputs // per_word, outputs))
        scales = stored.expect("scales", FLOAT_DTYPES)
        groups = scales.shape[0] if scales.shape else 0
        stored.expect("scales", FLOAT_DTYPES, (groups, outputs))
        group = group_of(name, inputs, groups, stated=self.group)
        zeros = self._zeros(name, stored.expect("qzeros", (torch.int32,), (groups, outputs // per_word)).read())
        order = stored.order("g_idx", inputs, group)
        if self.ordered and "g_idx" not in stored:
            raise contradiction("desc_act=True", f"there is no '{name}.g_idx'")
        middle = 2 ** (self.bits - 1)
        symmetric = bool((zeros == middle).all())
        if self.bits == 8 and not symmetric:
            raise refuse("GPTQ", f"has {name!r} in 8 bits with zero points, which are read for 4 bits only")
        if self.symmetric and not symmetric:
            raise contradiction("sym=True", f"'{name}.qzeros' holds zero points other than {middle}")
        layout = Layout(
            bits=self.bits, group_size=None if self.bits == 8 and groups == 1 else cut_group(group),
            symmetric=symmetric, ordered=order is not None, scale_dtype=dtype_of(scales),
        )  # fmt: skip
        return Description(layout)

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
            return Int8Weight(integers, in_pieces(scale, 1 if scale.shape[1] == 1 else pieces), order)
        zeros = self._zeros(name, stored["qzeros"]).t().contiguous()  # [out, groups]
        weight = Int4Weight(
            words, in_pieces(scale, pieces), torch.tensor(shape, device=words.device), input_order=order
        )
        if order is not None:
            integers = unpack_words(words).index_select(1, order)
            weight = replace(weight, weight_packed=Int4Weight.from_integers(integers, scale).weight_packed)
        if (zeros == 8).all():
            return weight
        return replace(weight, weight_zero_point=pack_zero_points(in_pieces(zeros - 8, pieces).to(torch.int8)))

    def _zeros(self, name: str, words: Tensor) -> Tensor:
        """Unpack int32 [groups, out * bits / 32] -> int16 [groups, out]; of 4 bits from 0 to 15."""
        if self.bits == 8:
            return words.contiguous().view(torch.uint8).short() + self.less
        stored = _levels(words)
        if not self.less or stored.max() < 15:
            return stored + self.less
        if GPTQ_MODEL in self.writers:
            return _levels(words + ONES)
        if AUTO_GPTQ in self.writers:
            return (stored + 1) & 15
        raise HfAccelError(
            f"'{name}.qzeros' holds 15 in the checkpoint, a zero point of 0 less 1, which AutoGPTQ and GPTQModel "
            'store differently, and config.json does not say who wrote it; add "meta": {"quantizer": '
            f'"{AUTO_GPTQ}"}} or "{GPTQ_MODEL}" to its quantization_config'
        )


def _levels(words: Tensor) -> Tensor:
    """Unpack int32 [groups, out / 8] -> int16 [groups, out], as they are stored."""
    return (unpack_words(words.contiguous()) + 8).short()


def _writers(config: Mapping[str, Any]) -> set[str]:
    """Return the programs that config.json names: "gptqmodel" of "gptqmodel:5.0.0"."""
    meta = config.get("meta")
    named = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = named if isinstance(named, list) else [named]
    return {str(name).partition(":")[0].strip().lower().replace("-", "_") for name in names}


def in_pieces(values: Tensor, pieces: int) -> Tensor:
    """Repeat [out, groups] for groups that are cut into so many pieces."""
    return values if pieces == 1 else values.repeat_interleave(pieces, dim=1)
