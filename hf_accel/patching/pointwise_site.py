"""The description of a convolution over single rows, whose weight patch() may quantize."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ..config import GroupSize, WeightConfig
from ..linear.quant_pointwise import LINEAR, QuantPointwise
from .weight_sites import LinearSite

# With random weights, whose convolutions are larger than other weights, groups of 32 take 2 % longer than one scale
# for each output, and leave two thirds of its error in the states of Wav2Vec2-BERT.
POINTWISE_GROUP: GroupSize = 32


@dataclass(frozen=True)
class PointwiseSite(LinearSite):
    """A convolution over single rows, which is a linear layer. name: of the layer in it that will hold the weight."""

    is_within: ClassVar[bool] = True
    takes_order: ClassVar[bool] = False

    @staticmethod
    def of(name: str, module: Any, skip: str | None) -> PointwiseSite:
        group = None if module.in_channels % POINTWISE_GROUP else POINTWISE_GROUP
        return PointwiseSite(f"{name}.{LINEAR}", module, skip=skip, group_size=group)

    @property
    def weight(self) -> Tensor:
        return self.tensor.squeeze(2)

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.squeeze(2)]

    def config_in(self, config: WeightConfig, eight_bits: Collection[str] = ()) -> WeightConfig | None:
        """Return `config` without calibration, which does not reach convolutions."""
        kept = super().config_in(config, eight_bits)
        return kept and replace(kept, method="rtn", average_bits=None, calibration=None, resume=None)

    def refusal(self, config: WeightConfig) -> str | None:
        return "bitsandbytes has no convolutions" if config.is_nf4 else None

    def remarks(self, config: WeightConfig) -> list[str]:
        return ["rounded to nearest: calibration does not reach convolutions"] if config.needs_data else []

    def replacements(self, model: nn.Module, layers: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
        yield self.replaced, QuantPointwise(self.module, layers[self.key])
