"""NVFP4: 4-bit floats (E2M1) in groups of 16 inputs, whose scales are FP8 (E4M3), and one scale of the whole weight.

Source: compressed-tensors, `nvfp4-pack-quantized`. The number of the whole weight divides the scales of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...config import Format, Layout
from .byte_weight import FLOAT8
from .float4_weight import Float4Weight

NVFP4 = Layout(bits=4, format="nvfp4", group_size=16, scale_dtype=FLOAT8)
LARGEST_SCALE, LARGEST_NUMBER = 448.0, 6.0


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(Float4Weight):
    """w = number * (weight_scale / weight_global_scale), where the quotient is rounded to float32."""

    format: ClassVar[Format] = "nvfp4"
    only = NVFP4
    kept = ("weight_global_scale",)
    not_numbers = (0x7F, 0xFF)
    weight_global_scale: Tensor  # float32 [1]
    input_order: Tensor | None = None  # int32 [in], a permutation

    @classmethod
    def empty(
        cls, layout: Layout, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device | str, **more: Any
    ) -> Self:
        whole = torch.ones(1, dtype=torch.float32, device=device)
        return super().empty(layout, shape, dtype=dtype, device=device, weight_global_scale=whole)

    @property
    def divisor(self) -> Tensor:
        return self.weight_global_scale

    def factors(self, outputs: slice = slice(None)) -> Tensor:
        return self.weight_scale[outputs].float() / 2

    def for_largest(self, largest: Tensor) -> Self:
        whole = LARGEST_SCALE * LARGEST_NUMBER / largest.amax().clamp(min=torch.finfo(torch.float32).tiny)
        whole = whole.clamp(max=torch.finfo(torch.float32).max).reshape(1)
        scale = (largest * (whole / LARGEST_NUMBER)).clamp(max=LARGEST_SCALE).to(FLOAT8)
        return self.changed(weight_scale=scale, weight_global_scale=whole)

    @classmethod
    def of_factors(cls, packed: Tensor, factors: Tensor, divisor: Tensor | None) -> Self:
        assert divisor is not None
        return cls(packed, (factors.float() * 2).to(FLOAT8), divisor)
