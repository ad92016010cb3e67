"""The layout in which the weights of linear layers are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Format = Literal["int", "fp8", "mxfp4", "nvfp4"]
Activations = Literal["auto", "int8", "fp8"] | None


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
    def grouped_label(self) -> str:
        """The label with the size of groups, such as int4 group 64."""
        return f"{self.label} group {self.group_size}" if self.group_size else self.label

    @property
    def is_float4(self) -> bool:
        """True if the numbers are floats of 4 bits (E2M1)."""
        return self.bits == 4 and self.format != "int"

    @property
    def is_own(self) -> bool:
        """True if torch's own kernels multiply by such weights: with 8 bits they know no scales of groups."""
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

    def module_settings(self, activations: Activations) -> dict[str, Any]:
        """Return the settings of a layer, as config.json lists them."""
        return {**self.settings, "activations": activations}

    def __str__(self) -> str:
        """Return the text for the repr of a layer and for errors: "bits=4, group_size=32, symmetric=False"."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())

    def groups(self, in_features: int) -> int:
        """Scales of an output."""
        return 1 if self.group_size is None else in_features // self.group_size
