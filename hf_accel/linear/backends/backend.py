"""The interface of linear backends, and the description of a layer that they are asked about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...config import Activations, WeightConfig
from ..activations import EightBits
from ..formats import Layout, QuantizedWeight, zero_point_bytes
from ..formats.blocks import Blocks
from ..methods.rtn import quantize

Rounding = Literal["never", "many rows", "always"]  # the rows that a backend rounds to 8 bits
FEW_ROWS = 256  # on a GPU memory is the limit up to here; beyond, products are, and 8 bits have faster ones


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """Everything that a backend's decision may depend on.

    layout: that of the weight, without an order of the inputs, which no backend sees; its scale_dtype is None if it is
    dtype. dtype: that of the activations.
    """

    in_features: int
    out_features: int
    layout: Layout
    dtype: torch.dtype
    device_type: str = "cpu"
    activations: Activations = "auto"

    def __post_init__(self) -> None:
        scales = None if self.layout.scale_dtype is self.dtype else self.layout.scale_dtype
        if self.layout.ordered or scales is not self.layout.scale_dtype:
            object.__setattr__(self, "layout", replace(self.layout, ordered=False, scale_dtype=scales))

    @classmethod
    def of(cls, weight: Tensor, config: WeightConfig, *, device_type: str | None = None) -> LinearSpec:
        """Describe a float weight [out, in] quantized by `config`.

        device_type: where it will be, if it is on meta now.
        """
        return cls(
            in_features=weight.shape[1],
            out_features=weight.shape[0],
            layout=replace(config.layout, scale_dtype=torch.float32) if config.is_nf4 else config.layout,
            dtype=weight.dtype,
            device_type=device_type or weight.device.type,
            activations=config.activations,
        )

    @classmethod
    def of_stored(
        cls, weight: QuantizedWeight, activations: Activations, dtype: torch.dtype | None = None
    ) -> LinearSpec:
        """Describe a weight that is quantized already. dtype: that of the activations; None for that of the scales."""
        return cls(
            in_features=weight.shape[1],
            out_features=weight.shape[0],
            layout=weight.layout,
            dtype=dtype or weight.weight_scale.dtype,
            device_type=weight.weight_scale.device.type,
            activations=activations,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stored integers, scales, and zero points or minima."""
        layout, groups = self.layout, self.layout.groups(self.in_features)
        factors = self.out_features * groups * (layout.scale_dtype or self.dtype).itemsize
        has_zeros = layout.bits < 8 and not layout.symmetric and not layout.minima
        zero_points = zero_point_bytes(self.out_features, groups, layout.bits) if has_zeros else 0
        return self.integer_bytes + factors + (factors if layout.minima else zero_points)

    @property
    def integer_bytes(self) -> int:
        return self.in_features * self.out_features * self.layout.bits // 8


class GroupedExperts(ABC):
    """One call over the weights of all experts of a layer. parts: each expert's, packed, maybe moved side by side."""

    parts: list[Any]

    @abstractmethod
    def serves(self, x: Tensor) -> bool:
        """Return whether the call may stand for torch's operators on x now."""

    @abstractmethod
    def run(self, x: Tensor, starts: Tensor, biases: Tensor | None) -> Tensor:
        """x [rows, in] -> [rows, out] in x's dtype; rows starts[e] to starts[e + 1], int64 [experts + 1], are e's.

        biases: [experts, out].
        """

    def native(self, biases: Tensor | None) -> Any:
        """Return the weights as `kernels.cpu.mixture` reads them; None if it does not."""
        return None


class Backend(ABC):
    """One way to multiply by a quantized weight.

    layouts: labels of those that it reads. device_types: where it runs; none named: anywhere. dtypes: of activations;
        none named: any.
    activations: "int8" or "fp8" if it rounds each row of the input to 8 bits.
    reference: the backend of plain torch that rounds activations in the same way.
    row_invariant: row i of run(X) equals run(X[i:i+1]) bit for bit.
    slow_start: a call costs so much by itself that it does not pay for a small weight.
    own_formats_only: it reads only what `rtn` makes.
    finds_rows: it reads single outputs of INT8 and INT4 weights where they lie, see `rows`.
    """

    name: ClassVar[str]
    layouts: tuple[str, ...]
    device_types: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    activations: EightBits | None = None
    reference: ClassVar[str] = "reference"
    row_invariant: bool = False
    slow_start: ClassVar[bool] = False
    own_formats_only: ClassVar[bool] = True
    finds_rows: ClassVar[bool] = False

    def reads(self, spec: LinearSpec) -> bool:
        """Return whether it knows the format of the weight."""
        return spec.layout.label in self.layouts

    def is_for(self, device_type: str) -> bool:
        """Return whether it is meant for this kind of device. "auto" does not mention backends that are not."""
        return not self.device_types or device_type in self.device_types

    def refuses(self, spec: LinearSpec) -> str | None:
        """Return why it cannot multiply, as one clause for a user; None if it can."""
        if not self.is_for(spec.device_type):
            return f"it runs on {' and '.join(self.device_types)}, not on {spec.device_type}"
        if spec.activations not in ("auto", self.activations):
            kept = "it keeps activations in floating point"
            return f"it rounds activations to {self.activations.upper()}" if self.activations else kept
        if self.dtypes and spec.dtype not in self.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"it takes {' and '.join(names.rsplit(', ', 1))}, not {spec.dtype}"
        if self.own_formats_only and not spec.layout.is_own:
            minima = spec.layout.minima
            return f"it takes no {'minima' if minima else '8-bit weights with a scale for each group of inputs'}"
        return None

    def note(self, spec: LinearSpec) -> str | None:
        """Return a note for the user if this backend is chosen, or None."""
        return None

    @abstractmethod
    def pack(self, weight: QuantizedWeight) -> Any:
        """Pack a weight in the form that `run` reads, which is the only copy in memory."""

    def quantize(self, weight: Tensor, config: WeightConfig) -> Any:
        """Quantize a float weight [out, in] of any strides to the form that `run` reads: `pack` of `rtn.quantize`, bit
        for bit.

        A backend that can do both at once overrides it. Called in several threads, each with a share of torch's
        (`torch.get_num_threads()`). Raises UnsupportedError for NaN and infinity.
        """
        return self.pack(quantize(weight, config))

    @abstractmethod
    def unpack(self, packed: Any) -> QuantizedWeight:
        """Return the weight that was packed, exactly."""

    def blocks(self, packed: Any) -> Blocks | None:
        """Return the packed weight as a checkpoint holds it for this backend; None if it has no such form."""
        return None

    def adopt(self, blocks: Blocks, layout: Layout, shape: tuple[int, int]) -> Any:
        """Return what `run` reads over the tensors of `blocks`, without packing; None if they have to be packed.

        Both forms may share their memory, which may be a file's. layout, shape: of the stored weight [out, in].
        """
        return None

    @abstractmethod
    def run(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """Multiply x [rows, in], contiguous -> [rows, out] in x's dtype, without checks and gradients."""

    def rows(self, packed: Any, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up rows of a weight: indices [n] -> [n, in], dequantized. Raises IndexError for rows that it has not.

        `finds_rows` is true of a backend that has them without unpacking all.
        """
        return self.unpack(packed).rows(indices, dtype)

    def experts(self, parts: Sequence[Any]) -> GroupedExperts | None:
        """Make one call over packed weights of one shape; None if each has to be called by itself."""
        return None
