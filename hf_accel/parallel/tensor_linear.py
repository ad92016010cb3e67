"""Quantized linear layers of which each rank of a tensor parallel group holds a part."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from ..errors import UnsupportedError
from ..linear import QuantLinear
from ..tensors import is_sharded, local_tensor
from .rank_agreement import RankAgreement
from .tensor_plan import GATHERS, PLAIN, REDUCES, SPLITS


class JoinedLinear(QuantLinear):
    """A part of a layer whose ranks need each other's results. Inference only: no gradient crosses ranks here."""

    ranks: RankAgreement

    def part_forward(self, x: Tensor) -> Tensor:
        """Compute this rank's part, without a gradient. Raises UnsupportedError if a gradient is asked for."""
        out = QuantLinear.forward(self, x)
        if out.requires_grad:
            raise UnsupportedError(
                "quantized weights that are split over ranks compute no gradient; call the model under "
                "torch.no_grad(), or patch it with weights=None to train it"
            )
        return out


class ReducedLinear(JoinedLinear):
    """A layer with a part of the inputs: x [..., in / ranks] -> [..., out], summed over all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.part_forward(x).contiguous()
        distributed.all_reduce(out, group=self.ranks.group)
        return out

    @property
    def added_bias(self) -> nn.Parameter | None:
        """Add the bias on one rank only: each rank holds the whole of it."""
        return self.bias if self.ranks.leads else None


class SplitLinear(ReducedLinear):
    """A ReducedLinear for whole inputs: x [..., in] -> [..., out]. A rank takes its part of x."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.ranks.rank * self.in_features
        return super().forward(x[..., start : start + self.in_features])


class GatheredLinear(JoinedLinear):
    """A layer with a part of the outputs: x [..., in] -> [..., out], joined from all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.part_forward(x).contiguous()
        parts = [torch.empty_like(out) for _ in range(self.ranks.size)]
        distributed.all_gather(parts, out, group=self.ranks.group)
        return torch.cat(parts, -1)


CLASSES: dict[str, type[QuantLinear]] = {
    PLAIN: QuantLinear,  # whose part needs no other
    GATHERS: GatheredLinear,
    REDUCES: ReducedLinear,
    SPLITS: SplitLinear,
}


def part_bias(bias: nn.Parameter | None) -> nn.Parameter | None:
    """Return the bias of a rank's part: that of its outputs, or the whole bias where the inputs are split."""
    return nn.Parameter(local_tensor(bias), requires_grad=bias.requires_grad) if is_sharded(bias) else bias  # type: ignore[union-attr]
