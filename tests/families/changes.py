"""What users and trainers do to a model that is in use. Each change says whether the model has what it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Change = Callable[[PreTrainedModel], bool]


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of the text model: the longest list of modules that one name stands for."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = [module for module in (text or model).modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def weights(model: PreTrainedModel) -> Iterator[nn.Parameter]:
    """The first matrix of each block."""
    for layer in layers(model):
        matrices = [p for p in layer.parameters() if p.ndim == 2 and p.is_floating_point()]
        yield from matrices[:1]


@torch.no_grad()
def written_in_place(model: PreTrainedModel) -> bool:
    return bool([weight.mul_(1.3) for weight in weights(model)])


def written_by_data(model: PreTrainedModel) -> bool:
    return bool([weight.data.mul_(1.3) for weight in weights(model)])


def written_by_numpy(model: PreTrainedModel) -> bool:
    """Of which numpy has the dtype."""
    found = [weight for weight in weights(model) if weight.dtype != torch.bfloat16]
    return bool([weight.detach().numpy().__imul__(1.3) for weight in found])


def replaced_data(model: PreTrainedModel) -> bool:
    return bool([setattr(weight, "data", weight.data * 1.3) for weight in weights(model)])


def steered(model: PreTrainedModel) -> bool:
    """A hook that moves what a block returns."""

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output + 0.5
        return (output[0] + 0.5, *output[1:]) if isinstance(output[0], Tensor) else output

    return bool([layer.register_forward_hook(move) for layer in layers(model)[:1]])


def another_forward(model: PreTrainedModel) -> bool:
    """The last linear of a block is multiplied by what the user put in its place."""
    found = [m for layer in layers(model)[-1:] for m in layer.modules() if isinstance(m, nn.Linear)][-1:]
    for linear in found:
        linear.forward = MethodType(lambda self, x: nn.functional.linear(x, self.weight * 0.3, self.bias), linear)
    return bool(found)


def another_scale(model: PreTrainedModel) -> bool:
    found = [m for m in model.modules() if isinstance(getattr(m, "scaling", None), float)]
    return bool([setattr(module, "scaling", module.scaling * 0.5) for module in found])


def another_epsilon(model: PreTrainedModel) -> bool:
    found = [m for m in model.modules() if isinstance(getattr(m, "variance_epsilon", None), float)]
    return bool([setattr(module, "variance_epsilon", 0.5) for module in found])


def another_rotation(model: PreTrainedModel) -> bool:
    found = [m.inv_freq for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
    return bool([frequencies.mul_(0.5) for frequencies in found])


CHANGES: dict[str, Change] = {
    change.__name__.replace("_", " "): change
    for change in (
        written_in_place, written_by_data, written_by_numpy, replaced_data, steered, another_forward, another_scale,
        another_epsilon, another_rotation,
    )
}  # fmt: skip
