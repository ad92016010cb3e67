"""A model of one layer for trials: the code of a model around one of its attention modules, with small parts
instead of its weights.

So what the model hands to its attention, and what it makes of the result, can be tried in milliseconds, whatever the
size of the model and wherever its weights are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...recognition.trial import RandomNumbers, unwatched_twin
from ...undo.journal import original_class

ROWS = 64  # of tables of embeddings
LAYER_INDICES = ("layer_idx", "layer_id")


class SparseLinear(nn.Module):
    """A linear layer of which each output has one input, so that it costs nothing."""

    place: Tensor
    factor: Tensor

    def __init__(self, inputs: int, outputs: int, numbers: RandomNumbers) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("place", (numbers(outputs) * 1e4).long().remainder(inputs), persistent=False)
        self.register_buffer("factor", numbers(outputs), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x[..., self.place] * self.factor
        return result


def one_layer_model(model: PreTrainedModel, name: str, attention: Any = None) -> Any:
    """Return the model with the layer around its attention module `name` alone, on the CPU, in float32.

    attention: takes the place of that module; None for a copy of it.
    """
    path = name.split(".")
    return _around(model, path, attention, RandomNumbers())


def _around(module: nn.Module, path: list[str], attention: Any, numbers: RandomNumbers) -> Any:
    """Copy a module with what the path leads to; of a list, nothing else."""
    if not path:
        return _small(module, numbers) if attention is None else attention
    first, *rest = path
    inside = _around(module.get_submodule(first), rest, attention, numbers)
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList([inside])
    parts = {
        key: _small(child, numbers) for key, child in module._modules.items() if child is not None and key != first
    }
    return _twin(module, {**module._modules, **parts, first: inside}, numbers)


def _small(module: nn.Module, numbers: RandomNumbers) -> Any:
    """Copy a module and all in it, with small parts instead of linear layers and tables."""
    own: Any = module
    if isinstance(getattr(own, "in_features", None), int) and isinstance(getattr(own, "out_features", None), int):
        return SparseLinear(own.in_features, own.out_features, numbers)
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList(_small(child, numbers) for child in module)
    if isinstance(module, nn.Dropout):
        return nn.Identity()
    children = {key: None if child is None else _small(child, numbers) for key, child in module._modules.items()}
    made = _twin(module, children, numbers)
    for index in LAYER_INDICES:
        if isinstance(vars(made).get(index), int):
            vars(made)[index] = 0
    return made


def _twin(module: nn.Module, children: dict[str, Any], numbers: RandomNumbers) -> Any:
    own: Any = module
    parameters = {}
    for key, parameter in own._parameters.items():
        if parameter is not None:
            rows = min(ROWS, parameter.shape[0]) if isinstance(module, nn.Embedding) else parameter.shape[0]
            parameters[key] = nn.Parameter(numbers(rows, *parameter.shape[1:]), requires_grad=False)
    # Code may write to its buffers, or put others in their places.
    buffers = {key: None if buffer is None else buffer.clone() for key, buffer in own._buffers.items()}
    made = unwatched_twin(module, _modules=children, _parameters=parameters, _buffers=buffers)
    made.__class__ = original_class(module)
    vars(made).update(training=False, _non_persistent_buffers_set={*own._non_persistent_buffers_set})
    if isinstance(made, nn.Embedding):
        vars(made)["padding_idx"] = None
    return made
