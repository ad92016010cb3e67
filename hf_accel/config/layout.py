"""The layout of a linear layer's weight, which users choose, checkpoints state and backends are asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Format = Literal["int", "fp8", "mxfp4"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The properties of a quantized weight besides its shape.

    bits: of a number. format: the kind of numbers. group_size: inputs that share a scale; None, for 8 bits only: a
    scale for each output. symmetric: without zero points. minima: instead of zero points. ordered: whether the
    inputs have an order of their own. scale_dtype: None is the dtype of the activations.
    """

    bits: int = 8
    format: Format = "int"
    group_size: int | None = None
    symmetric: bool = True
    minima: bool = False
    ordered: bool = False
    scale_dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        """The name that users give it, such as int8 or fp8."""
        return f"int{self.bits}" if self.format == "int" else self.format

    @property
    def is_own(self) -> bool:
        """True if rounding to nearest makes such weights; the others were quantized by other programs."""
        return not self.minima and (self.group_size is None) == (self.bits == 8)

    @property
    def settings(self) -> dict[str, Any]:
        """Return its settings for config.json, which `spec_of` in linear/layer_settings.py reads."""
        settings: dict[str, Any] = {"bits": self.bits}
        if self.format != "int":
            settings["format"] = self.format
        if self.group_size is not None:
            settings["group_size"] = self.group_size
        if self.bits != 8:
            settings["symmetric"] = self.symmetric and not self.minima
        settings |= {name: True for name in ("minima", "ordered") if getattr(self, name)}
        return settings | ({"scale_dtype": str(self.scale_dtype).removeprefix("torch.")} if self.scale_dtype else {})

    def __str__(self) -> str:
        """Return the text for the repr of a layer and for errors: "bits=4, group_size=32, symmetric=False"."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def groups(self, in_features: int) -> int:
        """Scales of an output."""
        return 1 if self.group_size is None else in_features // self.group_size
