"""A second model over the same Parameters."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def twin(model: Model) -> Model:
    """A copy of everything but Parameters and buffers, which both models then hold."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
