"""What a linear backend is, and what it is asked about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..config import Activations, WeightConfig
from .formats import QuantizedWeight, zero_point_bytes
from .rtn import quantize


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """Everything a backend may decide by.

    dtype: of the activations and scales. group_size, symmetric: read for 4 bits only.
    """

    in_features: int
    out_features: int
    bits: int
    dtype: torch.dtype
    group_size: int = 128
    symmetric: bool = True
    device_type: str = "cpu"
    activations: Activations = "auto"

    @classmethod
    def of(cls, weight: Tensor, config: WeightConfig, *, device_type: str | None = None) -> LinearSpec:
        """What `config` makes of a float weight [out, in]; device_type: where it will be, if it is on meta now."""
        return cls(
            in_features=weight.shape[1],
            out_features=weight.shape[0],
            bits=config.bits,
            group_size=config.group_size,
            symmetric=config.symmetric,
            dtype=weight.dtype,
            device_type=device_type or weight.device.type,
            activations=config.activations,
        )

    @classmethod
    def of_stored(cls, weight: QuantizedWeight, activations: Activations) -> LinearSpec:
        """What a weight that is quantized already needs."""
        return cls(
            in_features=weight.shape[1],
            out_features=weight.shape[0],
            bits=weight.bits,
            group_size=weight.group_size,
            symmetric=weight.symmetric,
            dtype=weight.weight_scale.dtype,
            device_type=weight.weight_scale.device.type,
            activations=activations,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stored integers, scales and zero points."""
        groups = 1 if self.bits == 8 else self.in_features // self.group_size
        zero_points = 0 if self.bits == 8 or self.symmetric else zero_point_bytes(self.out_features, groups)
        return self.integer_bytes + self.out_features * groups * self.dtype.itemsize + zero_points

    @property
    def integer_bytes(self) -> int:
        return self.in_features * self.out_features * self.bits // 8


class Backend(ABC):
    """One way to multiply by a quantized weight.

    bits: the widths it reads. device_type: where it runs; None: anywhere. dtypes: of activations; none named: any.
    activations: "int8" if it rounds each row of the input to 8 bits.
    reference: the backend of plain torch that rounds activations in the same way.
    row_invariant: row i of run(X) equals run(X[i:i+1]) bit for bit.
    slow_start: a call costs so much by itself that it does not pay for a small weight.
    """

    name: ClassVar[str]
    bits: ClassVar[tuple[int, ...]]
    device_type: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    activations: Literal["int8"] | None = None
    reference: ClassVar[str] = "reference"
    row_invariant: ClassVar[bool] = False
    slow_start: ClassVar[bool] = False

    def refuses(self, spec: LinearSpec) -> str | None:
        """None, or why not, as one clause a user can read."""
        if self.device_type not in (None, spec.device_type):
            return f"it runs on {self.device_type}, not on {spec.device_type}"
        if spec.activations not in ("auto", self.activations):
            return "it rounds activations to INT8" if self.activations else "it keeps activations in floating point"
        if self.dtypes and spec.dtype not in self.dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"it takes {' and '.join(names.rsplit(', ', 1))}, not {spec.dtype}"
        return None

    def note(self, spec: LinearSpec) -> str | None:
        """What a user should know if this backend is chosen; None: nothing."""
        return None

    @abstractmethod
    def pack(self, weight: QuantizedWeight) -> Any:
        """The form that `run` reads; the only copy kept in memory."""

    def quantize(self, weight: Tensor, config: WeightConfig) -> Any:
        """A float weight [out, in], any strides, in the form that `run` reads: `pack` of `rtn.quantize`, bit for bit.

        A backend that can do both at once overrides it. Called in several threads, each with a share of torch's
        (`torch.get_num_threads()`). Raises UnsupportedError for NaN and infinity.
        """
        return self.pack(quantize(weight, config))

    @abstractmethod
    def unpack(self, packed: Any) -> QuantizedWeight:
        """The weight that was packed, exactly."""

    @abstractmethod
    def run(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """x [rows, in], contiguous -> [rows, out] in x's dtype. No checks, no gradient."""
