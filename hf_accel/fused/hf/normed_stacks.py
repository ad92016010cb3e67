"""Encoders whose layers end in a norm (post-norm, as BERT has them), known by the trace of a layer.

A norm at the end of each layer scales the sum of its inputs back to one size, so that what rounding adds keeps its
share of it. Where the sum is handed on as it is (pre-norm), the numbers grow from layer to layer, and what is added to
them counts for less and less.
"""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedModel

from ...attention.hf import ATTENTION_NAME
from ...recognition.call_form import usual_form
from ...recognition.code import code_of
from ...recognition.known_modules import INPUTS
from ...recognition.operation import UntraceableError
from ...recognition.trace import Trace
from ...recognition.unchanged import has_own_forward
from .encoder_sites import attending_layers, width_of

NORMS = ("layer_norm", "norm")  # kinds of operations


def normed_stacks(model: PreTrainedModel, *, longer_than: int) -> list[str]:
    """Return the names of lists of more than `longer_than` layers that attend to all tokens and end in a norm.

    A list of which the trace of the first layer is not known to the last step is none of them.
    """
    stacks: dict[str, list[tuple[nn.Module, nn.Module]]] = {}
    for name, layer, attention in attending_layers(model):
        stacks.setdefault(name.rpartition(".")[0], []).append((layer, attention))
    return [name for name, layers in stacks.items() if len(layers) > longer_than and _ends_in_norm(model, *layers[0])]


def _ends_in_norm(model: PreTrainedModel, layer: nn.Module, attention: nn.Module) -> bool:
    if not code_of(attention).attends or getattr(attention, "is_causal", True) or has_own_forward(layer):
        return False
    # In training mode a layer drops numbers, and has no trace: that of a model does not depend on the mode it is in.
    evaluated = copy.deepcopy(layer, {id(parameter): parameter for parameter in layer.parameters()}).eval()
    trace = Trace(model.dtype, attention=ATTENTION_NAME)
    try:
        trace.layer(evaluated, width_of(attention), usual_form(type(layer), model.dtype, INPUTS))
    except UntraceableError:
        return False
    return trace.operations[-1].kind in NORMS
