"""INT8 and INT4 weights times activations in floating point through our Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import triton as kernels
from ..tensors import is_recorded
from .backend import Backend, GroupedExperts, LinearSpec
from .formats import Int4Weight, Int8Weight, QuantizedWeight

BLOCKS = {4: (128, 64, 32), 8: (64, 32, 16)}  # inputs that one product takes, by bits


class TritonExperts(GroupedExperts):
    """One launch over weights that lie one after the other. fixed: one tile for any number of rows."""

    def __init__(self, parts: Sequence[Any], *, fixed: bool) -> None:
        from ..kernels.triton.quantized_linear import parts_of_stack, stacked

        self.weight, self.fixed = stacked(parts), fixed
        self.parts = parts_of_stack(self.weight)

    def serves(self, x: Tensor) -> bool:
        return not (torch.is_grad_enabled() or is_recorded() or torch.is_autocast_enabled(x.device.type))

    def run(self, x: Tensor, starts: Tensor, biases: Tensor | None) -> Tensor:
        from ..kernels.triton.quantized_linear import quantized_linear
        from .tiles import for_experts, one_tile, tile_for

        rows_of_one = -(-len(x) // len(self.parts))
        tile = for_experts(one_tile(x.dtype) if self.fixed else tile_for(rows_of_one, self.weight, x.dtype))
        biases = None if biases is None else biases.contiguous()
        return quantized_linear(x.contiguous(), self.weight, biases, tile=tile, starts=starts)


def _multiply(x: Tensor, weight: Any, bias: Tensor | None, *, row_invariant: bool) -> Tensor:
    # Triton is optional, and slow to import: only who uses it needs it.
    from ..kernels.triton.quantized_linear import quantized_linear
    from .tiles import one_tile, tile_for

    tile = one_tile(x.dtype) if row_invariant else tile_for(len(x), weight, x.dtype)
    return quantized_linear(x, weight, bias, tile=tile)


@torch.library.custom_op("hf_accel::blocked_linear", mutates_args=())
def recorded_blocked_linear(
    x: Tensor, integers: Tensor, scale: Tensor, zero_point: Tensor | None, minimum: Tensor | None,
    bias: Tensor | None, in_features: int, row_invariant: bool,
) -> Tensor:  # fmt: skip
    """The kernel as a torch operator, which compiled and exported graphs can record."""
    from ..kernels.triton.quantized_linear import BlockedWeight

    weight = BlockedWeight(
        integers=integers, scale=scale, in_features=in_features, zero_point=zero_point, minimum=minimum
    )
    return _multiply(x.contiguous(), weight, bias, row_invariant=row_invariant)


@recorded_blocked_linear.register_fake
def _(
    x: Tensor, integers: Tensor, scale: Tensor, zero_point: Tensor | None, minimum: Tensor | None,
    bias: Tensor | None, in_features: int, row_invariant: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], integers.shape[-2])


class Triton(Backend):
    """Reads the stored integers once for each tile of rows; sums in float32.

    row_invariant: one tile serves any number of rows, and no sum is split. Without it, tiles and splits depend on the
    number of rows, and so does the rounding.
    """

    name = "triton"
    bits = (8, 4)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    own_formats_only = False

    def __init__(self, *, row_invariant: bool) -> None:
        self.row_invariant = row_invariant

    def is_for(self, device_type: str) -> bool:
        return kernels.is_for(device_type)

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = kernels.refusal(spec.device_type) or super().refuses(spec)
        if reason is None and block_size(spec.bits, spec.layout.group_size, spec.in_features) is None:
            return f"it takes groups of a multiple of {BLOCKS[spec.bits][-1]} inputs, not {spec.group_size}"
        return reason

    def pack(self, weight: QuantizedWeight) -> Any:
        from ..kernels.triton.quantized_linear import BlockedWeight

        out_features, in_features = weight.shape
        block = block_size(weight.bits, weight.group_size if weight.by_group else None, in_features)
        assert block is not None
        integers = F.pad(weight.integers(), (0, -in_features % block)).view(out_features, -1, block)
        zero_point = None
        if isinstance(weight, Int4Weight):
            low, high = integers.view(torch.uint8).chunk(2, dim=-1)
            integers = low & 15 | high << 4
            zero_point = weight.zero_points()
        return BlockedWeight(
            integers=_by_block(integers),
            scale=_by_block(weight.weight_scale),
            in_features=in_features,
            zero_point=None if zero_point is None else _by_block(zero_point),
            minimum=None if weight.weight_minimum is None else _by_block(weight.weight_minimum),
        )

    def unpack(self, packed: Any) -> QuantizedWeight:
        stored = _by_block(packed.integers)
        scale = _by_block(packed.scale)
        minimum = None if packed.minimum is None else _by_block(packed.minimum)
        if packed.bits == 8:
            integers = stored.flatten(1)[:, : packed.in_features].contiguous()
            return Int8Weight(integers, scale, None, minimum)
        signed = stored.view(torch.int8)
        integers = torch.cat((signed << 4 >> 4, signed >> 4), dim=-1).flatten(1)
        zero_point = None if packed.zero_point is None else _by_block(packed.zero_point)
        made = Int4Weight.from_integers(integers, scale, zero_point)
        return made if minimum is None else Int4Weight(made.weight_packed, scale, made.weight_shape, None, minimum)

    def run(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if is_recorded():
            w = packed
            out: Tensor = recorded_blocked_linear(
                x, w.integers, w.scale, w.zero_point, w.minimum, bias, w.in_features, self.row_invariant
            )
            return out
        return _multiply(x, packed, bias, row_invariant=self.row_invariant)

    def experts(self, parts: Sequence[Any]) -> GroupedExperts:
        return TritonExperts(parts, fixed=self.row_invariant)


def block_size(bits: int, group_size: int | None, in_features: int) -> int | None:
    """Inputs of a block, which lie in one group; None if there is no such block. group_size: None if there are none.

    Without groups the last block may be cut.
    """
    of = in_features if group_size is None else group_size
    fitting = next((block for block in BLOCKS[bits] if of % block == 0), None)
    return BLOCKS[bits][-1] if fitting is None and group_size is None else fitting


def _by_block(values: Tensor) -> Tensor:
    """[outputs, blocks, ...] -> [blocks, outputs, ...], and back."""
    return values.transpose(0, 1).contiguous()
