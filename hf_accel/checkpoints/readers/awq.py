"""AWQ checkpoints, as AutoAWQ writes them (version "gemm").

Source of the layout: AutoAWQ's WQLinear_GEMM. `qweight` int32 [in, out / 8] packs the levels of 8 consecutive outputs
in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits; `qzeros` int32 [groups, out / 8] packs zero points in the
same way; `scales` [groups, out]. The weight is (level - zero point) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...linear import Int4Weight, QuantizedWeight
from ...linear.formats import Layout, unpack_words
from .gptq import FLOAT_DTYPES, in_pieces
from .reader import Description, ForeignReader, Parts, contradiction, cut_group, dtype_of, group_of, refuse

PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of 8 outputs, in a word


class Awq(ForeignReader):
    """Weights of 4 bits with zero points."""

    method = "awq"
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = config.get("bits", config.get("w_bit"))
        version = str(config.get("version", config.get("format", "gemm"))).lower()
        if bits != 4:
            raise refuse("AWQ", f"has weights of {bits} bits, of which 4 are read")
        if version != "gemm":
            raise refuse("AWQ", f"has version={version!r}, of which 'gemm' is read")
        self.asymmetric = config.get("zero_point") is True
        self.group = config.get("group_size", config.get("q_group_size"))

    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        name = stored.name
        outputs, inputs = shape
        if outputs % PER_WORD or inputs % PER_WORD:
            raise refuse("AWQ", f"has {name!r} [{outputs}, {inputs}], which is no whole number of 32-bit words")
        stored.expect("qweight", (torch.int32,), (inputs, outputs // PER_WORD))
        scales = stored.expect("scales", FLOAT_DTYPES)
        groups = scales.shape[0] if scales.shape else 0
        stored.expect("scales", FLOAT_DTYPES, (groups, outputs))
        group = group_of(name, inputs, groups, stated=self.group)
        symmetric = True
        if self.asymmetric and "qzeros" not in stored:
            raise contradiction("zero_point=True", f"there is no '{name}.qzeros'")
        if "qzeros" in stored:
            zeros = _levels(stored.expect("qzeros", (torch.int32,), (groups, outputs // PER_WORD)).read())
            symmetric = bool((zeros == 0).all())
        size = cut_group(group)
        return Description(Layout(bits=4, group_size=size, symmetric=symmetric, scale_dtype=dtype_of(scales)))

    def convert(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        group = shape[1] // len(stored["scales"])
        pieces = group // cut_group(group)
        scale = in_pieces(stored["scales"].t().contiguous(), pieces)
        zeros = _levels(stored["qzeros"]).t() if "qzeros" in stored else None
        zero_point = None if zeros is None or not zeros.any() else in_pieces(zeros, pieces).contiguous()
        return Int4Weight.from_integers(_levels(stored["qweight"]).t().contiguous(), scale, zero_point)


def _levels(words: Tensor) -> Tensor:
    """Unpack int32 [rows, out / 8] -> int8 [rows, out], level - 8."""
    nibbles = unpack_words(words).view(len(words), -1, PER_WORD)
    return nibbles[..., PLACES].flatten(1)
