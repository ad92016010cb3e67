"""A second model over the same numbers, to draft with or to compare with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedError
from ..linear import QuantModule
from ..linear.hf import is_split
from ..recognition.unchanged import ALL_HOOKS
from ..undo.state import find_state


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Make a deep copy with Parameters of its own over the same storage, and quantized layers over the same weights.

    Converting or patching the one leaves the other as it is; writing into a tensor in place changes both.
    Raises UnsupportedError for a model that is split over ranks: its modules call each other by closures.
    """
    if is_split(model):
        raise UnsupportedError(
            "this needs a second model over the same weights, which a model that is split over ranks cannot have; do "
            "it in one process that has the model whole"
        )
    modules = list(_modules(model))
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    memo: dict[int, Any] = {key: _alias(parameter) for key, parameter in parameters.items()}
    for module in modules:
        if isinstance(module, QuantModule) and module.choice is not None:
            memo[id(module)] = _sibling(module, memo)
    return copy.deepcopy(model, memo)


def _modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules of the model, and those that a patch has put aside."""
    yield from model.modules()
    state = find_state(model)
    for write in () if state is None else state.journal.writes:
        if isinstance(write.old, nn.Module):
            yield from write.old.modules()


def _alias(parameter: Tensor) -> Tensor:
    if type(parameter) is not nn.Parameter:
        return parameter  # other libraries' packed weights
    return nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)


def _sibling(layer: QuantModule, memo: dict[int, Any]) -> QuantModule:
    """Make a second layer over the same packed weight, to which neither ever writes."""
    sibling = layer.sibling(memo)
    sibling.train(layer.training)
    for hooks in ALL_HOOKS:
        vars(sibling)[hooks] = copy.deepcopy(vars(layer)[hooks], memo)
    sibling._is_full_backward_hook = layer._is_full_backward_hook
    return sibling
