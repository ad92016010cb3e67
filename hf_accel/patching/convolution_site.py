"""The description of a convolution that is a product of windows of rows, whose weight patch() may quantize."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..config import GroupSize, WeightConfig
from ..linear.quant_convolution import LINEAR, QuantConvolution
from ..recognition.window_products import as_matrix, inputs_of
from .weight_sites import LinearSite

# With random weights, whose convolutions are larger than other weights, groups of 32 take 2 % longer than one scale
# for each output, and leave two thirds of its error in the states of Wav2Vec2-BERT.
CONVOLUTION_GROUP: GroupSize = 32


@dataclass(frozen=True)
class ConvolutionSite(LinearSite):
    """A convolution over rows, which is a linear layer of its windows. name: of the layer in it that will hold the
    weight.
    """

    is_within: ClassVar[bool] = True
    unreached: ClassVar[str | None] = "convolutions"
    takes_order: ClassVar[bool] = False

    @staticmethod
    def of(name: str, module: Any, skip: str | None) -> ConvolutionSite:
        group = None if inputs_of(module) % CONVOLUTION_GROUP else CONVOLUTION_GROUP
        return ConvolutionSite(f"{name}.{LINEAR}", module, skip=skip, group_size=group)

    @property
    def weight(self) -> Tensor:
        return as_matrix(self.tensor)

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        return [as_matrix(tensor)]

    def refusal(self, config: WeightConfig) -> str | None:
        return "bitsandbytes has no convolutions" if config.is_nf4 else None

    def replacements(self, model: nn.Module, layers: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
        yield self.replaced, QuantConvolution(self.module, layers[self.key])
