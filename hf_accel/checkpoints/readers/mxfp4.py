"""Checkpoints of gpt-oss: the weights of experts in MXFP4, all else in bfloat16.

Source of the layout: transformers, integrations/mxfp4.py. Of the parameter `gate_up_proj` of experts, which computes
[experts, in, out], `gate_up_proj_blocks` uint8 [experts, out, in / 32, 16] has two inputs in a byte, the first in its
low half, and `gate_up_proj_scales` uint8 [experts, out, in / 32] the exponents; `down_proj` likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...errors import HfAccelError
from ...linear import QuantizedWeight
from ...linear.formats import MXFP4, Mxfp4Weight
from .reader import Description, ForeignReader, Parts

GROUP = 32  # inputs
BLOCKS, SCALES = "blocks", "scales"


class Mxfp4(ForeignReader):
    """The weights of fused experts, which lie there as they are computed with: output by output."""

    method = "mxfp4"
    suffixes: ClassVar[tuple[str, ...]] = (BLOCKS, SCALES)
    of_experts = ("gate_up_proj", "down_proj")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Only the files tell which weights are quantized, whether modules_to_not_convert names them or not."""

    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        blocks = stored.expect(BLOCKS, (torch.uint8,)).shape or (0,)
        outputs, inputs = shape
        if blocks[1:] != (outputs, inputs // GROUP, GROUP // 2) or inputs % GROUP:
            raise HfAccelError(
                f"'{stored.name}_{BLOCKS}' is {list(blocks)} in the checkpoint, but the weight of each expert is "
                f"[{outputs}, {inputs}], in blocks of {GROUP} inputs; copy it again"
            )
        stored.expect(SCALES, (torch.uint8,), blocks[:-1])
        return Description(MXFP4)

    def convert(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        outputs, inputs = shape  # of all experts
        return Mxfp4Weight(stored[BLOCKS].reshape(outputs, inputs // 2), stored[SCALES].reshape(outputs, -1))
