"""The conditions under which a model's passes can be captured as graphs, and what a captured graph depends on."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch
from torch import nn

from ...attention import PlannedAttention
from ...recognition.unchanged import Hooks, has_own_forward
from ...tensors import plain_tensors
from ...undo.state import BACKEND_ATTRIBUTE, find_state
from ..graphs import SPLIT
from .model_runner import prepare_step

SCALARS = (bool, int, float, str, NoneType, torch.dtype)


def model_refusal_of_graphs(model: nn.Module) -> str | None:
    """Return why no pass of a patched model can be captured, as a clause; None if it is not known that none can."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        return f"the model is on {len(devices)} devices"
    state = find_state(model)
    if state is not None and state.generation.agreement.size > 1:
        return SPLIT
    for name, module in model.named_modules():
        if has_own_forward(module):
            return f"the forward of {name or 'the model'} was replaced on the module itself"
        planned: PlannedAttention | None = vars(module).get(BACKEND_ATTRIBUTE)
        if planned is not None and not planned.backend.capturable:
            return f"the attention backend {planned.backend.name!r} reads the lengths of sequences on the host"
    return None


class Dependencies:
    """The parts of a model that a graph depends on: addresses of its weights, plain values of modules, no hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.values = tuple(_values(model))
        self._hooks = Hooks(model.modules(), prepare_step)

    @property
    def hook_refusal(self) -> str | None:
        """The reason why no graph can run now, as a clause. It is cheap, so it can be asked before each pass."""
        return "a hook wants to see a module" if self._hooks.any_others() else None


def _values(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        own = vars(module)
        yield type(module)
        yield tuple((name, value) for name, value in own.items() if isinstance(value, SCALARS))
        yield id(own.get("_packed")), id(own.get(BACKEND_ATTRIBUTE))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            for plain in () if tensor is None else plain_tensors(tensor):
                yield plain.data_ptr(), plain.dtype, plain.shape
