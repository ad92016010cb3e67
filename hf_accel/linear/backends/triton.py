"""INT8, FP8 and INT4 weights times activations, in floating point or rounded, through our Triton kernels."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import triton as kernels
from ...tensors import is_recorded
from ..activations import EightBits
from ..formats import ByteWeight, Float4Weight, Int4Weight, Layout, QuantizedWeight, kind_of
from .backend import FEW_ROWS, Backend, GroupedExperts, LinearSpec, Rounding

BLOCKS = {
    "int4": (128, 64, 32),
    "int8": (64, 32, 16),
    "fp8": (64, 32),
    "mxfp4": (32,),
    "nvfp4": (32,),  # two groups
}  # inputs that one product takes
FEWER_BITS: dict[EightBits, tuple[str, ...]] = {"int8": ("int4",), "fp8": ()}  # that rounded rows multiply as well
WITHOUT_GROUPS = (64, 32)  # of 8 bits with a scale for each output: the second for inputs that the first would cut
MOST_SHARED_ROWS = 64  # that one launch multiplies by several weights: with more, a launch is a small part
LEAST_BYTES = 32  # of a block: integers that one product of integers takes


class TritonExperts(GroupedExperts):
    """One launch over weights that lie one after the other, with the tiles of `backend`."""

    def __init__(self, parts: Sequence[Any], backend: Triton) -> None:
        from ...kernels.triton.quantized_linear import parts_of_stack, stacked

        self.weight, self.backend = stacked(parts), backend
        self.parts = parts_of_stack(self.weight)

    def serves(self, x: Tensor) -> bool:
        return not (torch.is_grad_enabled() or is_recorded() or torch.is_autocast_enabled(x.device.type))

    def run(self, x: Tensor, starts: Tensor, biases: Tensor | None) -> Tensor:
        from ...kernels.triton.quantized_linear import quantized_linear
        from .tiles import for_experts

        rows_of_one = max(2, -(-len(x) // len(self.parts)))  # one row has tiles of its own, for one weight
        tile = for_experts(_tile(rows_of_one, self.weight, x.dtype, self.backend))
        biases = None if biases is None else biases.contiguous()
        return quantized_linear(x.contiguous(), self.weight, biases, tile=tile, starts=starts)


def _tile(rows: int, weight: Any, dtype: torch.dtype, backend: Triton) -> Any:
    # Triton is optional, and slow to import: it is imported on first use.
    from .tiles import one_tile, tile_for

    only = one_tile(weight, dtype, backend.rounding) if backend.row_invariant else None
    return only or tile_for(rows, weight, dtype, backend.rounding)


def shared_tile(rows: int, weights: Sequence[Any], dtype: torch.dtype, backend: Triton) -> Any:
    """Return the tile by which one launch multiplies so many rows by several weights; None if each has its own launch.

    It is the tile of one of them, without splits.
    """
    from ...kernels.triton.blocked_weight import LinearTile

    if backend.row_invariant:
        return None
    tiles = [_tile(rows, weight, dtype, backend) for weight in weights]
    chosen = next((tile for tile in tiles if getattr(tile, "inputs", None) is not None), tiles[0])
    if not isinstance(chosen, LinearTile) or chosen.rounded or rows > MOST_SHARED_ROWS:
        return None
    return replace(chosen, splits=1)


def _multiply(x: Tensor, weight: Any, bias: Tensor | None, backend: Triton) -> Tensor:
    from .tiles import multiply

    return multiply(x, weight, bias, _tile(len(x), weight, x.dtype, backend))


@torch.library.custom_op("hf_accel::blocked_linear", mutates_args=())
def recorded_blocked_linear(
    x: Tensor, integers: Tensor, scale: Tensor, zero_point: Tensor | None, minimum: Tensor | None,
    divisor: Tensor | None, bias: Tensor | None, in_features: int, row_invariant: bool, rounding: str, layout: str,
) -> Tensor:  # fmt: skip
    """The kernel as a torch operator, which compiled and exported graphs can record. layout: its settings as JSON."""
    from ...kernels.triton.blocked_weight import BlockedWeight

    weight = BlockedWeight(
        integers=integers, scale=scale, in_features=in_features, layout=_layout_of(layout), zero_point=zero_point,
        minimum=minimum, divisor=divisor,
    )  # fmt: skip
    backend = Triton(row_invariant=row_invariant, rounding=cast(Rounding, rounding))
    return _multiply(x.contiguous(), weight, bias, backend)


@recorded_blocked_linear.register_fake
def _(
    x: Tensor, integers: Tensor, scale: Tensor, zero_point: Tensor | None, minimum: Tensor | None,
    divisor: Tensor | None, bias: Tensor | None, in_features: int, row_invariant: bool, rounding: str, layout: str,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], integers.shape[-2])


class Triton(Backend):
    """Reads the stored numbers once for each tile of rows; sums in float32.

    rounding: which rows are rounded to 8 bits, in each group of inputs as the CPU's kernels do it, and multiplied as
    such. "many rows": those of calls with more than FEW_ROWS, which arithmetic limits and not memory. rounded_to: FP8
    for FP8 weights, on a GPU that multiplies it, and INT8 for all others.
    row_invariant: one tile serves any number of rows, and no sum is split. Without it, tiles and splits depend on the
    number of rows, and so does the rounding. Rows that are always rounded to INT8 have the same bits in every tile.
    """

    name = "triton"
    device_types = kernels.DEVICES
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    own_formats_only = False
    finds_rows = True

    def __init__(self, *, row_invariant: bool, rounding: Rounding = "never", rounded_to: EightBits = "int8") -> None:
        self.row_invariant, self.rounding, self.rounded_to = row_invariant, rounding, rounded_to
        self.activations = rounded_to if rounding == "always" else None
        self.layouts = tuple(BLOCKS) if rounding == "never" else (rounded_to, *FEWER_BITS[rounded_to])

    def refuses(self, spec: LinearSpec) -> str | None:
        reason = kernels.refusal(spec.device_type) or super().refuses(spec)
        if reason is not None:
            return reason
        layout = spec.layout
        if block_size(layout, spec.in_features) is None:
            least = BLOCKS[layout.label][-1]
            if layout.is_float4:
                return f"it takes a multiple of {least} inputs, not {spec.in_features}"
            return f"it takes groups of a multiple of {least} inputs, not {layout.group_size}"
        if self.rounding != "never" and spec.activations is None:
            return f"it rounds activations to {self.rounded_to.upper()}"
        return None if self.rounding == "never" else self.unserved(spec)

    @staticmethod
    def unserved(spec: LinearSpec) -> str | None:
        """Return why rounded rows cannot be multiplied by such a weight, as a clause; None if they can."""
        layout = spec.layout
        if layout.format == "fp8" and spec.device_type == "cuda" and kernels.capability() < kernels.FP8:
            return "with FP8 activations it needs a GPU that multiplies FP8, of compute capability 8.9"
        if layout.minima:
            return "it takes no minima with INT8 activations"
        block = block_size(layout, spec.in_features) or 0
        if block * layout.bits < 8 * LEAST_BYTES:
            least = 8 * LEAST_BYTES // layout.bits
            return f"with INT8 activations it takes groups of a multiple of {least} inputs, not {layout.group_size}"
        return None

    def note(self, spec: LinearSpec) -> str | None:
        if self.rounding != "many rows":
            return None
        rounded = f"activations to {self.rounded_to.upper()}, or the weight to 16 bits"
        return f"calls with more than {FEW_ROWS} rows may round {rounded}"

    def pack(self, weight: QuantizedWeight) -> Any:
        from ...kernels.triton.blocked_weight import BlockedWeight

        out_features, in_features = weight.shape
        layout = replace(weight.layout, ordered=False, scale_dtype=None)
        block = block_size(layout, in_features)
        assert block is not None
        stored, scale = weight.integers(), weight.weight_scale
        padded = F.pad(stored.view(torch.int8), (0, -in_features % block))  # as bytes: torch does not add to FP8
        integers = padded.view(stored.dtype).view(out_features, -1, block)
        zero_point = divisor = None
        if isinstance(weight, Float4Weight):
            low, high = weight.codes().view(out_features, -1, block).chunk(2, dim=-1)
            integers, scale, divisor = low | high << 4, weight.factors().to(torch.bfloat16), weight.divisor
        if isinstance(weight, Int4Weight):
            low, high = integers.view(torch.uint8).chunk(2, dim=-1)
            integers = low & 15 | high << 4
            zero_point = weight.zero_points()
        return BlockedWeight(
            integers=_by_block(integers),
            scale=_by_block(scale),
            in_features=in_features,
            layout=layout,
            zero_point=None if zero_point is None else _by_block(_pairs(zero_point)),
            minimum=None if weight.weight_minimum is None else _by_block(weight.weight_minimum),
            divisor=divisor,
        )

    def unpack(self, packed: Any) -> QuantizedWeight:
        stored = _by_block(packed.integers)
        scale = _by_block(packed.scale)
        minimum = None if packed.minimum is None else _by_block(packed.minimum)
        kind = kind_of(packed.layout)
        if issubclass(kind, ByteWeight):
            return kind(stored.flatten(1)[:, : packed.in_features].contiguous(), scale, None, minimum)
        if issubclass(kind, Float4Weight):
            codes = torch.cat((stored & 15, stored >> 4), dim=-1).flatten(1)
            return kind.of_factors(codes[:, ::2] | codes[:, 1::2] << 4, scale, packed.divisor)
        signed = stored.view(torch.int8)
        integers = torch.cat((signed << 4 >> 4, signed >> 4), dim=-1).flatten(1)
        zero_point = None
        if packed.zero_point is not None:
            zero_point = _apart(_by_block(packed.zero_point))[: packed.out_features].contiguous()
        made = Int4Weight.from_integers(integers, scale, zero_point)
        return made if minimum is None else Int4Weight(made.weight_packed, scale, made.weight_shape, None, minimum)

    def rows(self, packed: Any, indices: Tensor, dtype: torch.dtype) -> Tensor:
        if packed.layout.label not in ("int8", "int4"):
            return super().rows(packed, indices, dtype)
        packed.scale[0].index_select(0, indices)  # raises IndexError, unlike that of another dimension
        zeros, minima = packed.zero_point, packed.minimum
        if zeros is not None:
            zeros = _by_block(_pairs(_apart(_by_block(zeros)).index_select(0, indices)))
        found = replace(
            packed, integers=packed.integers.index_select(1, indices), scale=packed.scale.index_select(1, indices),
            zero_point=zeros, minimum=None if minima is None else minima.index_select(1, indices),
        )  # fmt: skip
        return self.unpack(found).dequantize(dtype)

    def run(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        if is_recorded():
            w = packed
            out: Tensor = recorded_blocked_linear(
                x, w.integers, w.scale, w.zero_point, w.minimum, w.divisor, bias, w.in_features,
                self.row_invariant, self.rounding, _settings_of(w.layout),
            )  # fmt: skip
            return out
        return _multiply(x, packed, bias, self)

    def experts(self, parts: Sequence[Any]) -> GroupedExperts:
        return TritonExperts(parts, self)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # json is nothing that torch.compile traces
def _settings_of(layout: Layout) -> str:
    return json.dumps(layout.settings)


@functools.cache
def _layout_of(settings: str) -> Layout:
    read = json.loads(settings)
    return Layout(**{**read, "scale_dtype": getattr(torch, read["scale_dtype"]) if "scale_dtype" in read else None})


def block_size(layout: Layout, in_features: int) -> int | None:
    """Inputs of a block, which lie in one group, or in two of 4-bit floats; None if there is no such block.

    Without groups the last block may be cut.
    """
    group_size = layout.group_size
    if group_size is None:
        return WITHOUT_GROUPS[in_features % WITHOUT_GROUPS[0] > 0]
    whole = group_size if not layout.is_float4 or in_features % (2 * group_size) else 2 * group_size
    return next((block for block in BLOCKS[layout.label] if whole % block == 0), None)


def _pairs(values: Tensor) -> Tensor:
    """int8 [outputs, groups], -8 to 7 -> uint8 [outputs / 2, groups], the even output in the low half."""
    bits = F.pad(values, (0, 0, 0, len(values) % 2)).view(torch.uint8)
    return bits[::2] & 15 | bits[1::2] << 4


def _apart(pairs: Tensor) -> Tensor:
    """`_pairs`, taken back; with one output more if their number was odd."""
    signed = pairs.view(torch.int8)
    return torch.stack((signed << 4 >> 4, signed >> 4), dim=1).flatten(0, 1)


def _by_block(values: Tensor) -> Tensor:
    """[outputs, blocks, ...] -> [blocks, outputs, ...], and back."""
    return values.transpose(0, 1).contiguous()
