"""The places of a model that hold a weight which could be quantized."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..linear.hf import with_outputs_first
from ..tensors import local_tensor


@dataclass(frozen=True)
class LinearSite:
    """A module that multiplies by a weight matrix.

    is_tied: the weight is the input embedding's too. skip: one clause why the module stays, or None.
    """

    name: str
    module: nn.Module
    is_head: bool
    is_tied: bool
    skip: str | None

    @property
    def tensor_name(self) -> str:
        """The name of the weight in the model."""
        return f"{self.name}.weight"

    @property
    def count(self) -> int:
        """Weights in the parameter: one for each expert."""
        return 1

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """The parameter, or another tensor of its shape, as weights [out, in]."""
        return [tensor.t() if isinstance(self.module, Conv1D) else tensor]

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters["weight"]
        assert parameter is not None
        return parameter

    @property
    def tensor(self) -> Tensor:
        """The parameter's numbers, or, of a model that is split over ranks, those that this rank holds."""
        return local_tensor(self.parameter)

    @property
    def weight(self) -> Tensor:
        """[out, in], whatever the module's own layout."""
        return self.tensor.t() if isinstance(self.module, Conv1D) else self.tensor

    @property
    def bias(self) -> nn.Parameter | None:
        return self.module._parameters.get("bias")


@dataclass(frozen=True)
class ExpertsSite(LinearSite):
    """A parameter of fused experts. name: of the module that will hold it. module: the experts. key: the parameter."""

    key: str = ""

    @property
    def experts_name(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def tensor_name(self) -> str:
        return f"{self.experts_name}.{self.key}"

    @property
    def count(self) -> int:
        return int(self.parameter.shape[0])

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        return list(with_outputs_first(self.module, tensor))

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter

    @property
    def weight(self) -> Tensor:
        """[experts, out, in]"""
        return with_outputs_first(self.module, self.tensor)

    @property
    def bias(self) -> None:
        """Biases of experts stay where they are."""
