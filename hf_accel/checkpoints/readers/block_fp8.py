"""FP8 checkpoints as DeepSeek and Qwen publish them: float8_e4m3fn with a scale for each block of outputs and inputs.

Source of the layout: transformers, FineGrainedFP8Config; w = q * weight_scale_inv of its block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...linear import Float8Weight, QuantizedWeight
from ...linear.formats import FLOAT8, Layout
from .gptq import FLOAT_DTYPES
from .reader import Description, ForeignReader, Found, Parts, dtype_of, group_of, refuse

NAME = "fp8"
SCALES = "weight_scale_inv"


class BlockFp8(ForeignReader):
    """Weights with scales of blocks, and activations that are rounded as they come, or not at all here."""

    method = NAME
    suffixes: ClassVar[tuple[str, ...]] = (SCALES,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise refuse(NAME, f"has activation_scheme={config['activation_scheme']!r}, of which 'dynamic' is read")
        self._block = checked_block(NAME, config.get("weight_block_size"))

    def is_part(self, suffix: str, found: Found) -> bool:
        return suffix in self.suffixes or (suffix == "weight" and found.dtype is FLOAT8)

    def describe(self, stored: Parts, shape: tuple[int, int]) -> Description:
        stored.expect("weight", (FLOAT8,), shape)
        return described(stored, SCALES, self._block, shape)

    def convert(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        return Float8Weight(stored["weight"], by_output(stored[SCALES], self._block, shape))

    def own_tensors(self, name: str, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        return {"weight_scale": by_output(parts[SCALES], self._block, shape)}


def checked_block(method: str, block: Any) -> tuple[int, int]:
    """Return the outputs and inputs that share a scale. Raises UnsupportedError for what is no such pair."""
    if not isinstance(block, Sequence) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise refuse(method, f"has blocks of {block!r}, of which [outputs, inputs], as [128, 128], are read")
    return block[0], block[1]


def described(stored: Parts, suffix: str, block: tuple[int, int], shape: tuple[int, int]) -> Description:
    """Return how a Linear [out, in] with scales of blocks is held: a scale for each output and group of inputs."""
    groups = -(-shape[1] // block[1])
    scales = stored.expect(suffix, FLOAT_DTYPES, (-(-shape[0] // block[0]), groups))
    group = group_of(stored.name, shape[1], groups)
    if group != min(block[1], shape[1]):
        raise refuse(NAME, f"has {stored.name!r} with {shape[1]} inputs, which are no whole blocks of {block[1]}")
    group_size = group if groups > 1 else None
    return Description(Layout(format="fp8", group_size=group_size, scale_dtype=dtype_of(scales)))


def by_output(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Repeat the scales of blocks for their outputs -> [out, groups]."""
    return scale.repeat_interleave(block[0], dim=0)[: shape[0]].contiguous()
