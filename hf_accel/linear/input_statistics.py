"""Statistics of a Linear's inputs, measured on calibration data."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import UnsupportedError

CHUNK_ROWS = 4096  # rows in float32 at a time
DAMPING = 0.01  # share of the mean of the Hessian's diagonal that is added to it
MOST_DAMPING = 1.0


@dataclass(eq=False)
class Statistics:
    """Statistics of the inputs of a Linear.

    hessian: float32 [in, in], 2 / rows * X^T X, of the squared error of the outputs (Frantar et al., GPTQ, 2023).
    magnitudes: float32 [in], the mean of |x| per input channel (Lin et al., AWQ, 2024).
    rows: their number. scales: float32 [in], by which the inputs were divided, so that weights must be multiplied;
    None if they were not.
    """

    hessian: Tensor
    magnitudes: Tensor
    rows: int
    scales: Tensor | None = None
    _factors: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, inputs: Tensor) -> Statistics:
        """inputs: [..., in] of any floating dtype. Raises UnsupportedError for NaN, infinity, and no rows at all."""
        rows = inputs.detach().flatten(0, -2)
        if len(rows) == 0:
            raise UnsupportedError("the calibration data has no tokens; give it some")
        hessian = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float32, device=rows.device)
        magnitudes = torch.zeros_like(hessian[0])
        for chunk in torch.split(rows, CHUNK_ROWS):
            wide = chunk.float()
            hessian.addmm_(wide.t(), wide)
            magnitudes += wide.abs().sum(0)
        if not hessian.isfinite().all():
            raise UnsupportedError(
                "the calibration data leads to NaN or infinity here; look for it in the model's weights, or load the "
                "model in float32"
            )
        return cls(hessian.mul_(2 / len(rows)), magnitudes / len(rows), len(rows))

    @property
    def dead(self) -> Tensor:
        """bool [in]: inputs that were zero in all rows, and of whose weights nothing is known."""
        return self.hessian.diagonal() == 0

    def importance(self, group_size: int) -> Tensor:
        """float32 [in / group, group, 1]: the diagonal of the Hessian; dead inputs count as others do on average."""
        diagonal = self.hessian.diagonal()
        usual = diagonal.mean() if diagonal.any() else diagonal.new_ones(())
        return torch.where(self.dead, usual, diagonal).view(-1, group_size, 1)

    def costs(self, group_size: int) -> Tensor:
        """float32 [in / group, group, 1]: what rounding an input costs once those after it have made up for it."""
        order, factor = self.factor(by_size=True)
        return (
            torch.empty_like(self.magnitudes).index_copy_(0, order, factor.diagonal().pow(-2)).view(-1, group_size, 1)
        )

    def blocks(self, group_size: int) -> Tensor:
        """float32 [in / group, group, group]: the Hessians of groups of inputs, with `importance` as diagonals."""
        count = len(self.hessian) // group_size
        groups = self.hessian.view(count, group_size, count, group_size)
        blocks = torch.stack([groups[i, :, i] for i in range(count)])
        blocks.diagonal(dim1=1, dim2=2).copy_(self.importance(group_size).squeeze(-1))
        return blocks

    def divided(self, scales: Tensor) -> Statistics:
        """Return the statistics of the inputs divided by scales [in]."""
        hessian = self.hessian / scales / scales.unsqueeze(1)
        return Statistics(hessian, self.magnitudes / scales, self.rows, scales)

    def order(self, *, by_size: bool) -> Tensor:
        """int64 [in]: the order in which inputs are rounded: as they are, or those with the largest values first."""
        diagonal = self.hessian.diagonal()
        return (
            diagonal.argsort(descending=True, stable=True)
            if by_size
            else torch.arange(len(diagonal)).to(diagonal.device)
        )

    def factor(self, *, by_size: bool) -> tuple[Tensor, Tensor]:
        """The order, and the upper U [in, in] in that order with U^T U = (hessian + damping)^-1.

        Made from one Cholesky factorization of the reversed Hessian R R^T, R upper: U = R^-1. Damping grows until
        it succeeds.
        """
        if by_size not in self._factors:
            order = self.order(by_size=by_size)
            self._factors[by_size] = order, self._inverse_factor(order)
        return self._factors[by_size]

    def _inverse_factor(self, order: Tensor) -> Tensor:
        damping, mean = DAMPING, self.hessian.diagonal().mean()
        if mean == 0:
            return torch.eye(len(order), device=order.device)
        while damping <= MOST_DAMPING:
            damped = self.hessian[order][:, order].flip(0, 1)
            diagonal = damped.diagonal()
            diagonal += damping * mean + (diagonal == 0) * mean
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not failed:
                identity = torch.eye(len(order), device=order.device)
                factor: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
                return factor
            damping *= 10
        raise UnsupportedError("the Hessian of the calibration data is not positive definite; give more data")
