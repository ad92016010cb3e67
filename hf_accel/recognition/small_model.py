"""Small copies of models for trials: the code of a model around a few of its layers, with small parts instead of its
weights.

So what the model hands to its layers, and what it makes of the result, can be tried in milliseconds, whatever the size
of the model and wherever its weights are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..models import is_within
from ..undo.journal import original_class
from .trial import PARTS_OF_MODULES, RandomNumbers, unwatched_twin
from .unchanged import PLAIN_TYPES, is_unobserved

ROWS = 64  # of tables of embeddings
LAYER_INDICES = ("layer_idx", "layer_id")
EXPERT_WIDTHS = ("hidden_dim", "hidden_size")  # what experts call the numbers of a token


def settings_of_layer(layer: nn.Module) -> Hashable:
    """Return what layers have in common of which a trial with drawn weights, as the first layer, shows the same:
    classes, settings, kinds of parameters, and shared objects. None for a layer that is watched or changed.
    """
    modules = [*layer.named_modules()]
    if not all(is_unobserved(module) for _, module in modules):
        return None
    return tuple((name, type(module), *_settings_of(module)) for name, module in modules)


def _settings_of(module: nn.Module) -> Iterator[Hashable]:
    own = vars(module)
    for name, value in own.items():
        if name not in PARTS_OF_MODULES and name not in LAYER_INDICES:
            yield name, type(value), value if isinstance(value, PLAIN_TYPES) else id(value)
    for name, parameter in own["_parameters"].items():
        yield name, *(() if parameter is None else (parameter.shape, parameter.dtype, parameter.device))
    yield from ((name, id(buffer)) for name, buffer in own["_buffers"].items())


class SparseLinear(nn.Module):
    """A linear layer of which each output has one input, so that it costs nothing.

    has_bias: it gives something for zeros, as those that hide padding are.
    """

    place: Tensor
    factor: Tensor
    shift: Tensor | None

    def __init__(self, inputs: int, outputs: int, numbers: RandomNumbers, *, has_bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("place", (numbers(outputs) * 1e4).long().remainder(inputs), persistent=False)
        self.register_buffer("factor", numbers(outputs), persistent=False)
        self.register_buffer("shift", numbers(outputs) if has_bias else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x[..., self.place] * self.factor
        return result if self.shift is None else result + self.shift

    @property
    def weight(self) -> Tensor:
        """Return a tensor with the dtype of a weight. There is none to multiply by, and code that does so fails."""
        return self.factor


class PlainExperts(nn.Module):
    """Stands for experts: each number of a token times a factor, so that their weights cost nothing."""

    factor: Tensor

    def __init__(self, width: int, numbers: RandomNumbers) -> None:
        super().__init__()
        self.register_buffer("factor", numbers(width), persistent=False)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states * self.factor


class FoldedTable(nn.Module):
    """Stands for a table of embeddings: of few rows, which all ids share."""

    def __init__(self, width: int, numbers: RandomNumbers) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(ROWS, width), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids % ROWS]


def one_layer_model(model: nn.Module, name: str, attention: Any = None, token: int = 0) -> Any:
    """Return the model with the layer around its attention module `name` alone, on the CPU, in float32.

    attention: takes the place of that module; None for a copy of it. token: see first_layers_model.
    """
    return _around(model, name.split("."), attention, _Copying(token=token))


def first_layers_model(model: nn.Module, lengths: Mapping[str, int], token: int = 0, *, plain: bool = False) -> Any:
    """Return the model with the first layers of some parts, on the CPU, in float32.

    lengths: by the name of a part, how many modules the outermost lists in it keep. token: an id, besides the first
    ROWS, that has an embedding. plain: whether PlainExperts take the place of experts, and FoldedTable that of tables.
    """
    return _copied(model, _Copying(lengths=lengths, token=token, plain=plain, biased=True))


@dataclass
class _Copying:
    """The settings of a copy, see first_layers_model, and where in the model it is.

    name: of the module that is being copied. layer: what its layer_idx becomes. biased: whether linear layers have
    biases where the model's have them, by which padding becomes something; a trial of attention alone needs none.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)
    token: int = 0
    plain: bool = False
    biased: bool = False
    name: str = ""
    layer: int = 0
    numbers: RandomNumbers = field(default_factory=RandomNumbers)

    def inside(self, name: str) -> _Copying:
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    @property
    def length(self) -> int | None:
        """Return how many modules of a list are copied; None for all."""
        found = [count for part, count in self.lengths.items() if is_within(self.name, part)]
        return min(found, default=None)


def _around(module: nn.Module, path: list[str], attention: Any, copying: _Copying) -> Any:
    """Copy a module with what the path leads to; of a list, nothing else."""
    if not path:
        return _copied(module, copying) if attention is None else attention
    first, *rest = path
    inside = _around(module.get_submodule(first), rest, attention, copying)
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList([inside])
    parts = {
        key: _copied(child, copying) for key, child in module._modules.items() if child is not None and key != first
    }
    return _twin(module, {**module._modules, **parts, first: inside}, copying)


def _copied(module: nn.Module, copying: _Copying) -> Any:
    """Copy a module and all in it, with small parts instead of linear layers and tables."""
    own: Any = module
    if isinstance(getattr(own, "in_features", None), int) and isinstance(getattr(own, "out_features", None), int):
        has_bias = copying.biased and getattr(own, "bias", None) is not None
        return SparseLinear(own.in_features, own.out_features, copying.numbers, has_bias=has_bias)
    if copying.plain and any(each is not None and each.ndim == 3 for each in own._parameters.values()):
        width = next((size for name in EXPERT_WIDTHS if isinstance(size := getattr(own, name, None), int)), None)
        if width is not None:
            return PlainExperts(width, copying.numbers)
    if copying.plain and original_class(module) is nn.Embedding:
        return FoldedTable(own.embedding_dim, copying.numbers)
    if isinstance(module, nn.ModuleList):
        if copying.length is None:
            return nn.ModuleList(_copied(child, copying) for child in module)
        layers = enumerate(islice(module, copying.length))
        return nn.ModuleList(_copied(child, replace(copying, lengths={}, layer=index)) for index, child in layers)
    if isinstance(module, nn.Dropout):
        return nn.Identity()
    if is_parametrized(module):
        module = _with_weights(module)
    children = {
        key: None if child is None else _copied(child, copying.inside(key)) for key, child in module._modules.items()
    }
    made = _twin(module, children, copying)
    for index in LAYER_INDICES:
        if isinstance(vars(made).get(index), int):
            vars(made)[index] = copying.layer
    return made


@torch.no_grad()
def _with_weights(module: Any) -> nn.Module:
    """Return a copy that has weights in place of those that the module computes of others, as weight norm does.

    torch makes a class for each such module, and does not let it be copied.
    """
    own, kind = vars(module), type(module).__mro__[1]
    made: nn.Module = object.__new__(kind)
    weights = {name: nn.Parameter(getattr(module, name), requires_grad=False) for name in module.parametrizations}
    parts = {key: child for key, child in module._modules.items() if child is not module.parametrizations}
    vars(made).update(own, _modules=parts, _parameters={**module._parameters, **weights})
    return made


def _twin(module: nn.Module, children: dict[str, Any], copying: _Copying) -> Any:
    own: Any = module
    parameters = {}
    for key, parameter in own._parameters.items():
        if parameter is not None:
            made = _table if isinstance(module, nn.Embedding) and parameter.ndim == 2 else _drawn
            parameters[key] = nn.Parameter(made(parameter, copying), requires_grad=False)
    # Code may write to its buffers, or put others in their places.
    buffers = {key: None if buffer is None else _cpu(buffer) for key, buffer in own._buffers.items()}
    made = unwatched_twin(module, _modules=children, _parameters=parameters, _buffers=buffers)
    made.__class__ = original_class(module)
    vars(made).update(training=False, _non_persistent_buffers_set={*own._non_persistent_buffers_set})
    if isinstance(made, nn.Embedding) and (made.padding_idx or 0) >= len(made.weight):
        vars(made)["padding_idx"] = None
    return made


def _drawn(parameter: Tensor, copying: _Copying) -> Tensor:
    return copying.numbers(*parameter.shape)


def _table(parameter: Tensor, copying: _Copying) -> Tensor:
    """Return a table whose first rows, and that of the one token, are drawn. Rows between them take no memory."""
    rows, width = parameter.shape
    if copying.token < ROWS or copying.token >= rows:
        return copying.numbers(min(ROWS, rows), width)
    table = torch.zeros(copying.token + 1, width)
    table[:ROWS], table[copying.token] = copying.numbers(ROWS, width), copying.numbers(width)
    return table


def _cpu(buffer: Tensor) -> Tensor:
    return torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.cpu().clone()
